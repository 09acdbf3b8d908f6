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

from exchange.checkpoint import open_checkpoint
from exchange.megatron.arguments import arguments_of
from exchange.megatron.export import export_megatron
from exchange.megatron.importing import import_megatron
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


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("world_size", [1, 2])
def test_megatron_computes_what_we_do(world_size: int, tmp_path: Path) -> None:
    """With what was exported, padded vocabulary, numbered layers and both layer specs included."""
    tokens = some_tokens()
    calls: list[Any] = []
    expected, labels = [], []
    for case in CASES:
        config = config_of(case)
        ours = write_checkpoint(tmp_path / case, config)
        logits, opened = our_logits(ours, tokens), open_checkpoint(ours, CONFIGS)
        assert logits.std() > 0.3
        variants: list[tuple[str, torch.dtype, Any, dict[str, Any]]] = [
            ("float32", torch.float32, "stacked", {}),
            ("bfloat16", torch.bfloat16, "stacked", {}),
        ]
        if case == "transformer":
            variants.append(("numbered", torch.float32, "numbered", {}))
        if world_size == 2:
            variants.append(("padded", torch.float32, "stacked", {"padded_vocab": 320}))
        for label, dtype, layers, options in variants:
            output = tmp_path / f"{case} {label}"
            export_megatron(opened, output, dtype=dtype, layers=layers)
            arguments = (output / "iter_0000000", config.model, tokens, dtype, options)
            calls.append((theirs.load_and_run, arguments))
            expected.append(logits)
            labels.append(f"{case}, {label}")
    for of_rank in launch(theirs.run_all, world_size, calls, seconds=_SECONDS):
        for label, logits, found in zip(labels, expected, of_rank, strict=True):
            far = difference(found[..., : logits.shape[-1]], logits)
            print(f"TP {world_size}, {label}: {far:.1e}")
            assert far < (0.2 if "bfloat16" in label else 1e-5), label
            assert found[..., logits.shape[-1] :].abs().sum() == 0


def test_we_compute_what_megatron_does(tmp_path: Path) -> None:
    """With what two tensor-parallel ranks of Megatron saved, optimizer state beside it."""
    tokens = some_tokens()
    saved: list[tuple[str, str, torch.dtype, dict[str, Any], bool]] = [
        ("hybrid", "float32", torch.float32, {}, False),
        ("hybrid with RoPE", "bfloat16", torch.bfloat16, {}, False),
        ("transformer", "float32", torch.float32, {}, False),
        ("transformer", "local spec", torch.float32, {"local_spec": True}, True),
        ("transformer", "bfloat16, padded", torch.bfloat16, {"padded_vocab": 384}, True),
    ]
    calls = []
    for case, label, dtype, options, numbered in saved:
        model, folder = config_of(case).model, tmp_path / f"{case}, {label}"
        arguments = arguments_of(model, 64, dtype == torch.bfloat16)
        # No attention of the local spec without a GPU: what it saved is computed by the other.
        calls.append((theirs.draw_and_save, (folder, model, dtype, arguments, options, numbered)))
        run = {name: value for name, value in options.items() if name != "local_spec"}
        calls.append((theirs.load_and_run, (folder, model, tokens, torch.float32, run)))
    results = launch(theirs.run_all, 2, calls, seconds=_SECONDS)[0]
    for (case, label, _, options, _), logits in zip(saved, results[1::2], strict=True):
        folder, ours = tmp_path / f"{case}, {label}", tmp_path / f"ours {case}, {label}"
        cut = ["model.vocab_size=300"] if "padded_vocab" in options else []
        imported = import_megatron(folder, ours, CONFIGS, overrides=cut)
        assert imported.config.model.pattern == config_of(case).model.pattern
        far = difference(our_logits(ours, tokens), logits[..., :300])
        print(f"{case}, {label}: {far:.1e}")
        assert far < 1e-5, label


def test_its_keys(golden: dict[str, Any]) -> None:
    """The listings that tests/exchange/test_megatron_names.py compares with are this megatron-core's."""
    calls = [
        (theirs.keys_of, (config_of(each["case"]).model, each["options"], each["numbered"])) for each in golden.values()
    ]
    (found,) = launch(theirs.run_all, 1, calls, seconds=_SECONDS)
    assert found == [each["keys"] for each in golden.values()]
