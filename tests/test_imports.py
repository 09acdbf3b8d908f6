"""Imports only go down the house: a room may import the rooms below it and nothing else of ours, unless it is run as a
program, and no file one that imports it in turn."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FLOORS = [
    "megatron_fp4/config",
    "megatron_fp4/quantization",
    "megatron_fp4/precision",
    "megatron_fp4/parallel",
    "megatron_fp4/runtime",
    "megatron_fp4/training",
    "megatron_fp4/checkpoint",
    "megatron_fp4/measure",
    "megatron_fp4/logging",
    "megatron_fp4/planning",
]
# Of training, what is above all other rooms of the package.
SPINE = ("trainer", "callbacks")
# What each room may import besides itself.
BELOW = {
    **{room: set(FLOORS[:i]) for i, room in enumerate(FLOORS)},
    "megatron_fp4/quantization": set(),
    "megatron_fp4/runtime": {*FLOORS[:4], "megatron_fp4/__version__"},
    "megatron_fp4/logging": {*FLOORS[:8], "megatron_fp4/__version__"},
    "megatron_fp4/training/spine": {*FLOORS, "megatron_fp4/__version__"},
    # Checking a configuration asks the rooms that know what fits.
    "data": set(),
    "models": {f"megatron_fp4/{room}" for room in ("config", "quantization", "precision", "parallel")},
    "exchange": {*FLOORS, "megatron_fp4/training/spine", "models", "data", "megatron_fp4/__version__"},
    "inference": {*FLOORS, "megatron_fp4/training/spine", "models", "data", "exchange"},
    "analysis": {*FLOORS, "megatron_fp4/training/spine", "models", "data", "exchange"},
}


TOP = {"data", "models", "exchange", "inference", "analysis", "pretrain", "scripts", "tests"}


def room_of(module: str) -> str | None:
    """The room a dotted module of ours belongs to; None for other people's modules."""
    parts = module.split(".")
    if parts[0] in TOP:
        return parts[0]
    if parts[:2] == ["megatron_fp4", "training"] and parts[2:3] and parts[2] in SPINE:
        return "megatron_fp4/training/spine"
    return "/".join(parts[:2]) if parts[0] == "megatron_fp4" else None


def imports(source: str) -> list[str]:
    """The dotted names that Python source imports, at its top, in functions and for type checkers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{ast.unparse(node)}: relative imports hide which way an arrow goes"
            module = node.module or ""
            # `from megatron_fp4.training import console` imports a module of the room named.
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


def as_imported(source: str) -> str:
    """Python source without what it does as a program, which is above all rooms."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if __name__ == '__main__':")]
    return ast.unparse(tree)


@pytest.mark.parametrize("room", BELOW)
def test_imports_go_down(room: str) -> None:
    paths = sorted((ROOT / room.removesuffix("/spine")).rglob("*.py"))
    files = [path for path in paths if room_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) == room]
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module in imports(as_imported(path.read_text()))
        if (target := room_of(module)) is not None and target != room and target not in BELOW[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_a_room() -> None:
    folders = {f"megatron_fp4/{path.parent.name}" for path in (ROOT / "megatron_fp4").glob("*/__init__.py")}
    assert folders | {"data", "models", "exchange", "inference", "analysis"} == BELOW.keys() - {
        "megatron_fp4/training/spine"
    }


def test_no_file_is_imported_by_what_it_imports() -> None:
    rooms = ("megatron_fp4", "models", "data", "exchange", "inference", "analysis", "scripts")
    paths = [*ROOT.glob("*.py"), *(path for room in rooms for path in (ROOT / room).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    sources = {name: path.read_text() for name, path in zip(names, paths, strict=True)}
    found = {}
    for name, source in sources.items():
        imported = {module if module in sources else module.rpartition(".")[0] for module in imports(source)}
        found[name] = imported & sources.keys() - {name}
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        raise AssertionError("imported by what it imports: " + " <- ".join(error.args[1])) from None
