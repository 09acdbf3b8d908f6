"""Imports go down only: a package may import the packages below it (CONTRIBUTING.md), except in code that runs only as
a program; and no modules import each other in a circle."""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.programs import ROOT

FLOORS = [
    f"megatron_fp4/{room}"
    for room in (
        "config", "quantization", "precision", "parallel", "runtime", "training", "checkpoint", "measure", "logging",
        "planning",
    )
]  # fmt: skip
# The part of training that is above all other packages of megatron_fp4.
SPINE = "megatron_fp4/training/spine"
VERSION = "megatron_fp4/__version__"
# The packages that each package may import besides itself.
BELOW = {
    **{room: set(FLOORS[:i]) for i, room in enumerate(FLOORS)},
    "megatron_fp4/quantization": set(),
    "megatron_fp4/runtime": {*FLOORS[:4], VERSION},
    "megatron_fp4/logging": {*FLOORS[:8], VERSION},
    SPINE: {*FLOORS, VERSION},
    "data": set(),
    "models": {f"megatron_fp4/{room}" for room in ("config", "quantization", "precision", "parallel")},
    "exchange": {*FLOORS, SPINE, "models", "data", VERSION},
    "inference": {*FLOORS, SPINE, "models", "data", "exchange"},
    "analysis": {*FLOORS, SPINE, "models", "data", "exchange"},
}
TOP = {"data", "models", "exchange", "inference", "analysis", "pretrain", "scripts", "tests"}


def room_of(module: str) -> str | None:
    """The package of a module of this project; None for other modules."""
    parts = module.split(".")
    if parts[0] in TOP:
        return parts[0]
    if parts[:2] == ["megatron_fp4", "training"] and parts[2:3] and parts[2] in ("trainer", "callbacks"):
        return SPINE
    return "/".join(parts[:2]) if parts[0] == "megatron_fp4" else None


@cache
def imports() -> dict[str, list[str]]:
    """The names that each module imports: at its top, in functions and for type checkers, but not under
    `if __name__ == "__main__"`."""
    paths = [*ROOT.glob("*.py"), *(path for room in (*TOP, "megatron_fp4") for path in (ROOT / room).rglob("*.py"))]
    found: dict[str, list[str]] = {}
    for path in paths:
        tree = ast.parse(path.read_text())
        body = [node for node in tree.body if not ast.unparse(node).startswith("if __name__ == '__main__':")]
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        names = found.setdefault(name, [])
        for node in (inner for one in body for inner in ast.walk(one)):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: write absolute imports, which show the direction"
                # `from megatron_fp4.training import console` may import a module.
                names += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("room", BELOW)
def test_imports_go_down_only(room: str) -> None:
    modules = [name for name in imports() if room_of(name) == room]
    wrong = [
        f"{name} imports {imported}"
        for name in modules
        for imported in imports()[name]
        if (target := room_of(imported)) is not None and target != room and target not in BELOW[room]
    ]
    assert modules and not wrong, "\n".join(wrong)


def test_every_folder_is_listed() -> None:
    folders = {f"megatron_fp4/{path.parent.name}" for path in (ROOT / "megatron_fp4").glob("*/__init__.py")}
    assert folders | {"data", "models", "exchange", "inference", "analysis"} == BELOW.keys() - {SPINE}


def test_the_map_of_contributing_is_this_order() -> None:
    """What a room may import stands below it. megatron_fp4/training stands there twice, its upper part first."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are")[2].split("```")[1]
    names = re.findall(r"^(  )?(\w+)/ ", text, re.MULTILINE)
    rooms = [f"megatron_fp4/{name}" if inside else name for inside, name in names]
    rooms[rooms.index("megatron_fp4/training")] = SPINE
    assert set(rooms) - {"configs", "scripts", "tests"} == BELOW.keys()
    for room, below in BELOW.items():
        assert below - {VERSION} <= set(rooms[rooms.index(room) + 1 :]), room


def test_there_are_no_circular_imports() -> None:
    modules = {name: names for name, names in imports().items() if not name.startswith("tests")}
    graph = {}
    for name, names in modules.items():
        graph[name] = {one if one in modules else one.rpartition(".")[0] for one in names} & modules.keys() - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("circular import: " + " <- ".join(error.args[1])) from None
