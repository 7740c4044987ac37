"""Who may know whom: the packages of the engine lie above each other, and imports point downwards, types included."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "minisgl"


def room(path: Path) -> str:
    """A package, or a module that lies beside them."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The rooms that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = ["minisgl", *path.relative_to(PACKAGE).parent.parts]
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("minisgl.")}
    return found


@pytest.fixture(scope="module")
def rooms() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py" or path.parent != PACKAGE:
            found.setdefault(room(path), set()).update(imported(path))
    return {name: others & found.keys() - {name} for name, others in found.items()}


def test_no_circle_between_packages(rooms: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(rooms).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_planes_meet_in_the_seam_alone(rooms: dict[str, set[str]]) -> None:
    """What schedules knows nothing of what computes, nor the other way round."""
    control, data = {"scheduler", "message", "tokenizer"}, {"engine", "models", "layers", "attention", "moe", "kernel"}
    for name in control:
        files = {"models"} if name == "tokenizer" else set()  # it reads the tokenizer that a model's files bring along
        assert not rooms[name] & (data - files)
    for name in data:
        assert not rooms[name] & control
        assert "server" not in rooms[name]
