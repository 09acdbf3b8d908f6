"""Our folders in megatron-core's own models, and theirs in ours: the same logits, at tensor-parallel sizes 1 and 2.

Runs where megatron-core is installed (`pip install megatron-core==0.16.1 einops`); its models run on the CPU with the
stand-ins of tests/exchange/megatron_core.py. `pytest -s` shows the differences.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exchange.checkpoint import open_checkpoint
from exchange.megatron import export_megatron, import_megatron
from exchange.megatron_model import arguments_of
from tests.exchange import megatron_core as theirs
from tests.exchange.megatron_cases import CASES, CONFIGS, config_of, our_logits, some_tokens, write_checkpoint
from tests.training.harness import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None or importlib.util.find_spec("einops") is None,
        reason="megatron-core is not installed",
    ),
]
_SECONDS = 600.0
_TOKENS = some_tokens()

# What is exported: case, label, dtype, layers, how Megatron's model is built.
_OUT: list[tuple[str, str, torch.dtype, Any, dict[str, Any]]] = [
    *((case, "float32", torch.float32, "stacked", {}) for case in CASES),
    *((case, "bfloat16", torch.bfloat16, "stacked", {}) for case in CASES),
    ("transformer", "numbered layers", torch.float32, "numbered", {}),
    ("hybrid", "padded vocabulary", torch.float32, "stacked", {"padded_vocab": 320}),
    ("transformer", "padded vocabulary", torch.float32, "stacked", {"padded_vocab": 320}),
]
# What two tensor-parallel ranks of Megatron save: case, label, dtype, how the model is built, numbered layers.
_IN: list[tuple[str, str, torch.dtype, dict[str, Any], bool]] = [
    ("hybrid", "float32", torch.float32, {}, False),
    ("hybrid with RoPE", "bfloat16", torch.bfloat16, {}, False),
    ("transformer", "float32", torch.float32, {}, False),
    ("transformer", "local spec, numbered layers", torch.float32, {"local_spec": True}, True),
    ("transformer", "bfloat16, padded vocabulary", torch.bfloat16, {"padded_vocab": 384}, False),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Tensor]:
    """Our logits of each case; what is exported of it lies in `folder`."""
    for case in CASES:
        write_checkpoint(folder / case, config_of(case))
    for case, label, dtype, layers, _ in _OUT:
        checkpoint = open_checkpoint(folder / case, CONFIGS)
        export_megatron(checkpoint, folder / f"{case}, {label}", dtype=dtype, layers=layers)
    return {case: our_logits(folder / case, _TOKENS) for case in CASES}


@pytest.fixture(scope="module")
def computed(folder: Path, expected: dict[str, Tensor], golden: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """What Megatron did on each rank, by world size: with `_OUT`, then its keys (one rank) or `_IN` (two)."""
    out = [
        (
            theirs.load_and_run,
            (folder / f"{case}, {label}" / "iter_0000000", config_of(case).model, _TOKENS, dtype, how),
        )
        for case, label, dtype, _, how in _OUT
    ]
    keys = [
        (theirs.keys_of, (config_of(each["case"]).model, each["options"], each["numbered"])) for each in golden.values()
    ]
    saved = []
    for case, label, dtype, how, numbered in _IN:
        model, path = config_of(case).model, folder / f"saved {case}, {label}"
        arguments = arguments_of(model, 64, dtype == torch.bfloat16)
        saved.append((theirs.draw_and_save, (path, model, dtype, arguments, how, numbered)))
        # In FP32, whatever it was saved in; and the local spec has no attention without a GPU.
        run = {name: value for name, value in how.items() if name != "local_spec"}
        saved.append((theirs.load_and_run, (path, model, _TOKENS, torch.float32, run)))
    return {
        "1": launch(theirs.run_all, 1, [*out, *keys], seconds=_SECONDS),
        "2": launch(theirs.run_all, 2, [*out, *saved], seconds=_SECONDS),
    }


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_megatron_computes_what_we_do(
    world_size: str, expected: dict[str, Tensor], computed: dict[str, list[list[Any]]]
) -> None:
    for rank, of_rank in enumerate(computed[world_size]):
        for (case, label, dtype, _, _), found in zip(_OUT, of_rank, strict=False):
            logits = expected[case]
            assert logits.std() > 0.3
            far = float((found[..., :300] - logits).abs().max())
            if rank == 0:
                print(f"exported {case}, {label}, tensor parallel {world_size}: {far:.1e}")
            assert far < (1e-5 if dtype == torch.float32 else 0.2), (case, label)
            assert found[..., 300:].abs().sum() == 0


def test_we_compute_what_megatron_does(folder: Path, computed: dict[str, list[list[Any]]]) -> None:
    """With what it saved, optimizer state beside it."""
    runs = computed["2"][0][len(_OUT) + 1 :: 2]
    for (case, label, _, how, _), logits in zip(_IN, runs, strict=True):
        saved, ours = folder / f"saved {case}, {label}", folder / f"imported {case}, {label}"
        cut = ["model.vocab_size=300"] if "padded_vocab" in how else []
        settings = import_megatron(saved, ours, CONFIGS, overrides=cut)
        assert settings["pattern"] == config_of(case).model.pattern
        assert logits.std() > 0.1
        far = float((our_logits(ours, _TOKENS) - logits[..., :300]).abs().max())
        print(f"imported {case}, {label}, saved by 2 ranks: {far:.1e}")
        assert far < 1e-5, (case, label)


def test_its_keys(golden: dict[str, Any], computed: dict[str, list[list[Any]]]) -> None:
    """The listings that tests/exchange/test_megatron.py compares with are this megatron-core's."""
    assert computed["1"][0][len(_OUT) :] == [each["keys"] for each in golden.values()]
