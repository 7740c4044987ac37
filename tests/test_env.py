"""MINISGL_* variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.env import EnvError, cache_dir, check_environment


def test_cache_dir(tmp_path: Path) -> None:
    assert cache_dir({"MINISGL_CACHE_DIR": str(tmp_path)}) == tmp_path
    assert cache_dir({"MINISGL_CACHE_DIR": "~/models"}) == Path.home() / "models"
    assert cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "minisgl"
    assert cache_dir({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "minisgl"
    assert cache_dir({"MINISGL_CACHE_DIR": ""}) == Path.home() / ".cache" / "minisgl"


def test_wrong_values(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(EnvError, match="absolute path, not 'models'"):
        check_environment({"MINISGL_CACHE_DIR": "models"})
    with pytest.raises(EnvError, match="is a file"):
        check_environment({"MINISGL_CACHE_DIR": str(file)})
    with pytest.raises(EnvError, match="MINISGL_CACHE is no setting of minisgl; did you mean MINISGL_CACHE_DIR"):
        check_environment({"MINISGL_CACHE": "/x"})
    check_environment({"HOME": "/", "MINISGL_CACHE_DIR": str(tmp_path)})
