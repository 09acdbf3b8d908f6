"""Imports only go down the house: a room may import the rooms below it and nothing else of ours, unless it is run as a
program, and no file one that imports it in turn."""

from __future__ import annotations

import ast
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
# Of training, what is above all other rooms of the package.
SPINE = "megatron_fp4/training/spine"
VERSION = "megatron_fp4/__version__"
# What each room may import besides itself.
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
    """The room a dotted module of ours belongs to; None for other people's modules."""
    parts = module.split(".")
    if parts[0] in TOP:
        return parts[0]
    if parts[:2] == ["megatron_fp4", "training"] and parts[2:3] and parts[2] in ("trainer", "callbacks"):
        return SPINE
    return "/".join(parts[:2]) if parts[0] == "megatron_fp4" else None


@cache
def imports() -> dict[str, list[str]]:
    """By dotted module: the names that its source imports, at its top, in functions and for type checkers, but not as a
    program, which is above all rooms."""
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
                assert node.level == 0, f"{name}: relative imports hide which way an arrow goes"
                # `from megatron_fp4.training import console` imports a module of the room named.
                names += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("room", BELOW)
def test_imports_go_down(room: str) -> None:
    modules = [name for name in imports() if room_of(name) == room]
    wrong = [
        f"{name} imports {imported}"
        for name in modules
        for imported in imports()[name]
        if (target := room_of(imported)) is not None and target != room and target not in BELOW[room]
    ]
    assert modules and not wrong, "\n".join(wrong)


def test_every_folder_is_a_room() -> None:
    folders = {f"megatron_fp4/{path.parent.name}" for path in (ROOT / "megatron_fp4").glob("*/__init__.py")}
    assert folders | {"data", "models", "exchange", "inference", "analysis"} == BELOW.keys() - {SPINE}


def test_no_file_is_imported_by_what_it_imports() -> None:
    modules = {name: names for name, names in imports().items() if not name.startswith("tests")}
    graph = {}
    for name, names in modules.items():
        graph[name] = {one if one in modules else one.rpartition(".")[0] for one in names} & modules.keys() - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("imported by what it imports: " + " <- ".join(error.args[1])) from None
