import numpy as np

from minisgl.uniform import mix, stream_key, uniforms

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The generator's output for one state, in plain integers."""
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def test_is_splitmix64():
    # The first outputs of the published generator for seed 1234567.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + (i + 1) * 0x9E3779B97F4A7C15) & MASK for i in range(3)]
    assert mix(np.array(states, dtype=np.uint64)).tolist() == known
    assert [splitmix64(state) for state in states] == known


def test_a_number_depends_on_its_key_and_position_only():
    keys = np.array([stream_key(s) for s in (0, 1, -1, 2**64 - 1, 2**63)], dtype=np.uint64)
    positions = np.array([0, 7, 7, 7, 100_000], dtype=np.int32)
    together = uniforms(keys, positions)
    assert together.dtype == np.float32
    for i in range(5):
        assert uniforms(keys[i : i + 1], positions[i : i + 1])[0] == together[i]
        state = (int(keys[i]) + int(positions[i]) * 0x9E3779B97F4A7C15) & MASK
        assert together[i] == (splitmix64(state) >> 40) / 2**24
    assert together[2] == together[3]  # seeds are taken modulo 2**64


def test_spread_evenly_over_positions_and_over_neighbouring_seeds():
    position = np.arange(20_000, dtype=np.int32)
    one_stream = uniforms(np.full(20_000, stream_key(42), dtype=np.uint64), position)
    many_seeds = uniforms(np.array([stream_key(s) for s in range(20_000)], dtype=np.uint64), np.full(20_000, 5))
    streams = uniforms(np.array([stream_key(0, s) for s in range(20_000)], dtype=np.uint64), np.full(20_000, 5))
    for sample in (one_stream, many_seeds, streams):
        assert sample.min() >= 0
        assert sample.max() < 1
        counts, _ = np.histogram(sample, bins=20, range=(0, 1))
        assert abs(counts - 1000).max() < 150  # about five standard deviations
        assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.035
