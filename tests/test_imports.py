"""Imports only go down the house: a room may import the rooms below it and nothing else of ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each room may import besides itself. `config` is open to everyone.
BELOW = {
    "megatron_fp4/quantization": set(),
    "megatron_fp4/precision": {"megatron_fp4/quantization"},
    "megatron_fp4/parallel": {"megatron_fp4/precision", "megatron_fp4/quantization"},
    "megatron_fp4/training": {"megatron_fp4/parallel", "megatron_fp4/precision", "megatron_fp4/quantization"},
    "data": set(),
    "models": {"megatron_fp4/parallel", "megatron_fp4/precision", "megatron_fp4/quantization"},
    # Composing and checking a configuration asks the rooms that know what fits.
    "megatron_fp4": {"megatron_fp4/training", "megatron_fp4/parallel", "megatron_fp4/precision"},
}


def room_of(module: str) -> str | None:
    """The room a dotted module of ours belongs to; None for other people's modules and for the shared config."""
    parts = module.split(".")
    if parts[0] in ("data", "models"):
        return parts[0]
    if parts[0] in ("pretrain", "assembly", "report", "scripts", "tests"):
        return parts[0]
    if parts[0] != "megatron_fp4" or parts[1:2] == ["config"]:
        return None
    inner = "/".join(parts[:2])
    return inner if inner in BELOW else "megatron_fp4"


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which way an arrow goes"
            module = node.module or ""
            # `from megatron_fp4.training import console` imports a module of the room named.
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("room", BELOW)
def test_imports_go_down(room: str) -> None:
    folder = ROOT / room
    files = sorted(folder.glob("*.py")) if room == "megatron_fp4" else sorted(folder.rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module in imports(path)
        if (target := room_of(module)) is not None and target != room and target not in BELOW[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_an_arrow_up_would_be_seen() -> None:
    assert room_of("megatron_fp4.training.step") == "megatron_fp4/training"
    assert room_of("models.hybrid") == "models"
    assert room_of("megatron_fp4.compose") == "megatron_fp4"
    assert room_of("megatron_fp4.config.Config") is None
    assert room_of("torch.distributed") is None
    assert "megatron_fp4/training" not in BELOW["models"] and "models" not in BELOW["megatron_fp4/training"]
