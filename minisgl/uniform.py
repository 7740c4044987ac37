"""Random numbers that are a pure function of (seed, position).

A counter-based generator: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
has the state ``key + i * GOLDEN`` at its i-th step, so any step can be had without the ones before it. What runs beside
a request, how its prompt is chunked and whether it was pre-empted cannot change what it draws.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minisgl.core import Float32

UInt64 = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB


def mix(x: UInt64) -> UInt64:
    """SplitMix64's output function: a bijection of 64 bits that looks random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MUL1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MUL2)
    return x ^ (x >> np.uint64(31))


def stream_key(seed: int, stream: int = 0) -> int:
    """The key of one request's numbers: far apart for seeds (and streams) that are close together."""
    key = seed & _MASK
    for word in (_GOLDEN, stream * _GOLDEN):
        key = (key + word) & _MASK
        key = ((key ^ (key >> 30)) * _MUL1) & _MASK
        key = ((key ^ (key >> 27)) * _MUL2) & _MASK
        key ^= key >> 31
    return key


def uniforms(keys: UInt64, positions: npt.NDArray[np.integer]) -> Float32:
    """One number in [0, 1) for each key and token position, float32 with 24 random bits."""
    bits = mix(keys + positions.astype(np.uint64) * np.uint64(_GOLDEN)) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)
