"""Megatron-core's checkpoints without megatron-core: against its listings, torch's own reader, and orders by hand."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.megatron import export as export_file
from exchange.megatron import writing
from exchange.megatron.arguments import arguments_of, as_shell, settings_of
from exchange.megatron.export import export_megatron
from exchange.megatron.importing import import_megatron
from exchange.megatron.names import extra_states, parameters
from exchange.megatron.reading import MegatronFolder
from models.hybrid import build_model
from scripts import export_megatron as export_script
from scripts import import_megatron as import_script
from tests.exchange.megatron_cases import (
    CASES,
    CONFIGS,
    ITERATION,
    checkpoints,
    config_of,
    read_by_torch,
    write_checkpoint,
)
from tests.training.harness import alone

__all__ = ["checkpoints"]


def test_keys_are_those_that_megatron_saves(golden: dict[str, Any]) -> None:
    for name, each in golden.items():
        config = config_of(each["case"]).model
        layers = "numbered" if each["numbered"] else "stacked"
        shapes = {s.name: list(p.stored_shape(s)) for p in parameters(config, layers) for s in p.sections}
        theirs = {key: shape for key, shape in each["keys"].items() if shape is not None}
        assert shapes == theirs, name
        objects = {key for key, shape in each["keys"].items() if shape is None}
        ours = set(extra_states(config, layers))
        # Its GPTModel asks for none of the head, and its own norms have none.
        assert objects <= ours and len(ours - objects) <= 2, name


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_the_models(case: str) -> None:
    config = config_of(case).model
    with alone() as mesh, torch.device("meta"):
        model = build_model(config, mesh, torch.float32)
    expected = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert [(parameter.name, parameter.shape) for parameter in parameters(config)] == expected


def test_orders(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    """By hand, and read by torch."""
    checkpoint = checkpoints["hybrid"]
    export_megatron(checkpoint, tmp_path / "out", dtype=torch.float32)
    theirs = read_by_torch(tmp_path / "out" / ITERATION)
    # 2 groups of 4 heads of 16, state 40: z, x, B, C, dt of a group have 64, 64, 40, 40, 4 rows.
    groups = checkpoint.tensor("blocks.0.mixer.in_proj.weight").view(2, 212, 64)
    first = 0
    for section, rows in (("z", 64), ("x", 64), ("B", 40), ("C", 40), ("dt", 4)):
        part = groups[:, first : first + rows].reshape(2 * rows, 64)
        assert torch.equal(theirs[f"decoder.layers.0.mixer.in_proj.weight.{section}"], part)
        first += rows
    conv = checkpoint.tensor("blocks.0.mixer.conv.weight").view(2, 144, 4)
    bias = checkpoint.tensor("blocks.0.mixer.conv.bias").view(2, 144)
    for section, at in (("x", slice(0, 64)), ("B", slice(64, 104)), ("C", slice(104, 144))):
        assert torch.equal(theirs[f"decoder.layers.0.mixer.conv1d.weight.{section}"], conv[:, at].reshape(-1, 1, 4))
        assert torch.equal(theirs[f"decoder.layers.0.mixer.conv1d.bias.{section}"], bias[:, at].reshape(-1))
    qkv = checkpoint.tensor("blocks.2.mixer.qkv_proj.weight")
    assert torch.equal(theirs["decoder.layers.2.self_attention.linear_qkv.weight"], qkv)
    assert torch.equal(theirs["decoder.layers.4.mixer.A_log"], checkpoint.tensor("blocks.4.mixer.ssm.A_log"))


def test_stacked_and_numbered_layers(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    checkpoint = checkpoints["transformer"]
    export_megatron(checkpoint, tmp_path / "one", dtype=torch.float32)
    export_megatron(checkpoint, tmp_path / "many", dtype=torch.float32, layers="numbered")
    one, many = (read_by_torch(tmp_path / name / ITERATION) for name in ("one", "many"))
    up = torch.stack([checkpoint.tensor(f"blocks.{block}.mixer.up_proj.weight") for block in (1, 3)])
    assert torch.equal(one["decoder.layers.mlp.linear_fc1.weight"], up)
    assert torch.equal(many["decoder.layers.1.mlp.linear_fc1.weight"], up[1])


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    """The same masters from FP32, the same BF16 weights from BF16; and the same settings, without a word."""
    checkpoint = checkpoints[case]
    for dtype in (torch.float32, torch.bfloat16):
        export_megatron(checkpoint, tmp_path / f"{dtype}", dtype=dtype)
        settings = import_megatron(tmp_path / f"{dtype}", tmp_path / f"back {dtype}", CONFIGS)
        back = open_checkpoint(tmp_path / f"back {dtype}", CONFIGS)
        assert back.weights_only and settings["name"] == f"{dtype}"
        for name in checkpoint.tensors:
            ours = checkpoint.tensor(name)
            expected = ours if ".ssm." in name else ours.to(dtype).float()
            assert torch.equal(back.tensor(name), expected), name
        model, other = checkpoint.config.model, back.config.model
        for key in settings.keys() - {"name", "mamba_chunk_size"}:
            assert getattr(other, key) == getattr(model, key), key
        export_megatron(back, tmp_path / f"again {dtype}", dtype=dtype)
        first, again = (read_by_torch(tmp_path / f"{word}{dtype}" / ITERATION) for word in ("", "again "))
        assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)
        assert {v.dtype for k, v in first.items() if k.endswith(("A_log", ".D", "dt_bias"))} <= {torch.float32}


def test_large_tensors_go_in_parts(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoints["hybrid"]
    export_megatron(checkpoint, tmp_path / "whole")
    most = 0
    read = Checkpoint.tensor

    def tensor(self: Checkpoint, name: str, rows: slice | None = None) -> Tensor:
        nonlocal most
        result = read(self, name, rows)
        if "in_proj" not in name and "conv" not in name:  # which are cut anew
            most = max(most, result.numel())
        return result

    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    monkeypatch.setattr(export_file, "_PART", 1000)
    monkeypatch.setattr(writing, "FILE_BYTES", 50_000)
    export_megatron(checkpoint, tmp_path / "parts")
    assert 0 < most <= 1000
    assert len(list((tmp_path / "parts" / ITERATION).glob("*.distcp"))) > 5
    whole, parts = (read_by_torch(tmp_path / name / ITERATION) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)
    opened = MegatronFolder(tmp_path / "parts")
    assert torch.equal(opened.tensor("output_layer.weight", rows=7), whole["output_layer.weight"][:7].float())


def test_arguments_say_what_the_model_is() -> None:
    for case in CASES:
        model = config_of(case).model
        told = settings_of(arguments_of(model, 64, bf16=True))
        assert told["num_query_heads"] == 4 and told["num_kv_heads"] == 2 and told["head_dim"] == 24
        assert told["norm_eps"] == model.norm_eps and told["rope"] == model.rope
        assert told.get("mamba_num_groups") == (2 if "M" in model.pattern else None)
    with_defaults = {
        "num_attention_heads": 8,
        "hidden_size": 512,
        "num_query_groups": 1,
        "group_query_attention": False,
    }
    assert settings_of(with_defaults) == {"num_query_heads": 8, "num_kv_heads": 8, "head_dim": 64}


def test_flags_survive_a_shell(tmp_path: Path) -> None:
    (tmp_path / "M-x-M-").touch()  # what an unquoted pattern would become
    (tmp_path / "args.sh").write_text(as_shell(arguments_of(config_of("hybrid").model, 64, bf16=True)))
    command = 'source args.sh; printf "%s\\n" "${MEGATRON_ARGS[@]}"'
    words = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    flags = words.splitlines()
    assert flags[flags.index("--hybrid-override-pattern") + 1] == "M-*-M-"
    assert flags[flags.index("--num-layers") + 1] == "6" and "--squared-relu" in flags and "--bf16" in flags
    assert flags[flags.index("--make-vocab-size-divisible-by") + 1] == "4"  # 300 rows


@pytest.mark.parametrize(
    ("case", "overrides", "layers", "words"),
    [
        ("hybrid", ["model.norm_eps=1e-6"], "stacked", "norm_eps=1e-06"),
        ("hybrid", ["model.mamba_conv_width=3"], "stacked", "mamba_conv_width=3"),
        ("hybrid", [], "numbered", "always numbered"),
        ("transformer", ["model.rope_base=500.5"], "stacked", "rope_base=500.5"),
    ],
)
def test_models_that_megatron_has_not(case: str, overrides: list[str], layers: Any, words: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "ours", config_of(case, *overrides)), CONFIGS)
    with pytest.raises(ValueError, match=words):
        export_megatron(checkpoint, tmp_path / "out", layers=layers)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_nothing_half_written(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    checkpoint = checkpoints["hybrid"]
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        export_megatron(checkpoint, tmp_path / "there")
    with pytest.raises(ValueError, match="inside the checkpoint"):
        export_megatron(checkpoint, checkpoint.folder / "out")

    def full(done: int, total: int) -> None:
        if done > total / 2:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        export_megatron(checkpoint, tmp_path / "out", progress=full)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = write_checkpoint(tmp_path / "ours", config_of("transformer"))
    assert export_script.main([str(ours), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert "100,160 parameters in 9 tensors" in said and 'pretrain_gpt.py "${MEGATRON_ARGS[@]}" --load' in said
    assert "no tokenizer: the run knew of none" in said
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert "GPTModel" in (tmp_path / "out" / "README.md").read_text()
    assert export_script.main([str(ours), str(tmp_path / "out")]) == 2
    refusal = f"export_megatron.py: {tmp_path / 'out'} exists already; name another folder, or remove it\n"
    assert capsys.readouterr().err == refusal
    arguments = [str(tmp_path / "out"), str(tmp_path / "back"), "--name", "mine"]
    assert import_script.main(arguments) == 0
    assert "mine; its settings are in" in capsys.readouterr().out
    assert "num_kv_heads: 2" in (tmp_path / "back.yaml").read_text()
    assert import_script.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (ours / "__0_0.distcp").write_bytes(bytes((ours / "__0_0.distcp").stat().st_size))
    assert export_script.main([str(ours), str(tmp_path / "again")]) == 2
    assert "SHA-256" in capsys.readouterr().err and not (tmp_path / "again").exists()
