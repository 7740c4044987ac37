import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from minisgl.kernel.cpu import build, detect_isa, load
from minisgl.kernel.cpu.build import BuildError, build_library


def test_one_build_serves_all_who_ask_at_once(tmp_path):
    cache = tmp_path / "new" / "cache"
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(lambda _: build_library("portable", cache), range(4)))
    (library,) = libraries
    assert sorted(p.suffix for p in cache.iterdir()) == [".lock", ".so"]
    built = library.stat().st_mtime_ns
    assert build_library("portable", cache) == library
    assert library.stat().st_mtime_ns == built


def test_a_changed_source_is_another_library(tmp_path, monkeypatch):
    first = build_library("portable", tmp_path / "cache")
    sources = tmp_path / "sources"
    sources.mkdir()
    for source in build.SOURCES.glob("*.[hc]*"):
        (sources / source.name).write_bytes(source.read_bytes())
    with open(sources / "kernels.cpp", "a") as file:
        file.write("// changed\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build_library("portable", tmp_path / "cache") != first
    (sources / "kernels.cpp").write_text("nonsense;\n")
    with pytest.raises(BuildError, match="nonsense"):
        build_library("portable", tmp_path / "cache")


def test_without_a_compiler_there_is_one_line_in_the_log(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    load.cache_clear()
    try:
        assert load() is None
        assert load() is None
    finally:
        load.cache_clear()
    (record,) = caplog.records
    assert "g++" in record.getMessage()


def test_an_unwritable_cache_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="cache directory"):
        build_library("portable", tmp_path / "file" / "cache")


def test_the_library_brings_no_second_openmp_runtime():
    code = """
        import torch
        from minisgl.kernel.cpu import load
        load().pack(torch.randn(512, 512)).matmul(torch.randn(64, 512))
        paths = {line.split()[-1] for line in open("/proc/self/maps")}
        print(*[path for path in paths if "gomp" in path or "iomp" in path or "libomp" in path])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert len(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()) == 1


def test_this_machine_has_kernels():
    assert detect_isa() in build.ISA_FLAGS
    assert load() is not None
