"""Who may know whom: the packages of the engine lie above each other, and imports point downwards, types included."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import minisgl

PACKAGE = Path(__file__).parents[1] / "minisgl"


def room(path: Path) -> str:
    """A package, or a module that lies beside them."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> list[str]:
    """The full names of what a file imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = ["minisgl", *path.relative_to(PACKAGE).parent.parts]
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


@pytest.fixture(scope="module")
def rooms() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py" or path.parent != PACKAGE:
            names = (name.split(".") for name in imported(path))
            found.setdefault(room(path), set()).update(name[1] for name in names if name[0] == "minisgl")
    return {name: others & found.keys() - {name} for name, others in found.items()}


def test_no_circle_between_packages(rooms: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(rooms).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_planes_meet_in_the_seam_alone(rooms: dict[str, set[str]]) -> None:
    """What schedules knows nothing of what computes, nor the other way round."""
    control = {"scheduler", "message", "tokenizer"}
    data = {"engine", "models", "layers", "attention", "moe", "kernel", "distributed"}
    for name in control:
        files = {"models"} if name == "tokenizer" else set()  # it reads the tokenizer that a model's files bring along
        assert not rooms[name] & (data - files)
    for name in data:
        assert not rooms[name] & control
        assert "server" not in rooms[name]


def test_no_torch_where_requests_are_scheduled() -> None:
    for name in ("scheduler", "message", "kvcache"):
        for path in (PACKAGE / name).glob("*.py"):
            if path.name != "device_pool.py":  # the one file there that holds tensors
                parts = {part for name in imported(path) for part in name.split(".")}
                assert not parts & {"torch", "device_pool"}, path


def test_nothing_inside_comes_through_the_front_door() -> None:
    """What `minisgl` itself offers is loaded late, for users."""
    offered = {f"minisgl.{name}" for name in minisgl.__all__} - {"minisgl.__version__"}
    for path in PACKAGE.rglob("*.py"):
        assert path.parent == PACKAGE or not offered & set(imported(path)), path
