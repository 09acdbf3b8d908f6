"""Exported NVFP4 weights are the operands of the model's GEMMs, bit for bit; quantization configs of the layouts."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exchange.architectures import sections_of
from exchange.nvfp4 import (
    COMPRESSED_TENSORS,
    LAYOUTS,
    MODELOPT,
    Layout,
    TrainedPlan,
    decoded,
    excluded_modules,
    hf_quant_config,
    multiplied_weight,
    quantization_config,
    trained_plan,
    trained_weight,
)
from megatron_fp4.precision.plan import PrecisionController
from megatron_fp4.precision.rng import StepState
from models.hybrid import build_model
from models.initialization import initialize
from tests.composing import composed, plans_of
from tests.distributed.hybrid import watched_gemms
from tests.quantization.oracle import block_values

# Groups of 40 rows in qkv_proj and of 139 in in_proj, which are padded to 48 and 144.
SIZES = [
    "model.vocab_size=48", "model.hidden_dim=64", "model.ffn_dim=112", "model.num_query_heads=6",
    "model.num_kv_heads=2", "model.head_dim=8", "train.sequence_length=16",
]  # fmt: skip
HYBRID = [
    *SIZES, "model=tiny", "model.pattern=M-*-M-", "model.mamba_num_heads=6", "model.mamba_head_dim=16",
    "model.mamba_num_groups=2", "model.mamba_state_dim=20", "model.nvfp4_bf16_blocks.last=2",
]  # fmt: skip
TRANSFORMER = [*SIZES, "model=transformer_30m", "model.pattern='*-*-*-'", "model.nvfp4_bf16_blocks.last=2"]
FOUR_OVER_SIX = "precision.fprop.weight.four_over_six=true"
CASES = {
    "hybrid, the paper's recipe": ([*HYBRID, "precision=nvfp4"], 8),
    "hybrid, the best recipe": ([*HYBRID, "precision=nvfp4_best"], 5),
    "Transformer, four over six, 1x16": ([*TRANSFORMER, "precision=nvfp4_all_the_way", FOUR_OVER_SIX], 12),
}


@pytest.mark.parametrize("case", CASES)
def test_exported_weights_are_what_the_gemm_multiplies(case, mesh, monkeypatch):
    """They equal the second operands of the running model's fprop GEMMs, without the padding of groups, although the
    export quantizes in parts, here of 32 rows, as it does with large weights."""
    monkeypatch.setattr("exchange.nvfp4._CHUNK_ELEMENTS", 64 * 40)
    overrides, count = CASES[case]
    config = composed(*overrides)
    plan, dtype = plans_of(config)[0], getattr(torch, config.precision.compute_dtype)
    model = build_model(config.model, mesh, dtype)
    initialize(model, config.model, seed=3)
    masters = {name: linear.weight.to_local().detach() for name, linear in model.linears()}
    for master in masters.values():  # make the maxima of all blocks and groups of rows differ
        master.mul_(torch.linspace(1, 5, len(master))[:, None]).mul_(torch.linspace(2, 1, master.shape[1]))
    PrecisionController({name: m.context for name, m in model.linears()}, plan, StepState(seed=5))
    operands: list[Any] = []
    with watched_gemms(lambda _, right: operands.append(right)), torch.no_grad():
        model(torch.arange(16)[None])
    given = dict(zip((*masters, "head"), operands, strict=True))
    rows, padded = TrainedPlan(plan, dtype).nvfp4_linears(), 0
    for name, row in rows.items():
        made, master, operand = trained_weight(masters[name], row, dtype), masters[name], given[name]
        groups = {"qkv_proj": 2, "in_proj": 2}.get(name.rpartition(".")[2], 1)
        parts = operand.values.float().chunk(groups)
        values = torch.cat([part[: len(master) // groups] for part in parts])
        padded += len(values) < len(operand.values)
        assert torch.equal(block_values(made.codes, made.scales), values), name
        assert torch.equal(made.decode_scale(), operand.scale), name
        asked, scale = multiplied_weight(master, row, dtype)
        assert torch.equal(asked, values) and torch.equal(scale, operand.scale), name
        # The values are quantized, and near the master.
        assert 0 < (values * operand.scale - master).abs().max() < master.abs().max()
    others = {row.linear.name: row.recipe.fprop.right.format for row in plan.rows if row.linear.name not in rows}
    assert set(others.values()) <= {"bf16", "mxfp8"}
    assert TrainedPlan(plan, dtype).other_formats().keys() == {name for name, form in others.items() if form == "mxfp8"}
    assert len(rows) == count and padded


def chosen(*overrides: str, switched_at: int | None = None, which: str = "now", **changes: object) -> TrainedPlan:
    """The trained plan of a checkpoint of a run with these overrides. changes: of the checkpoint's fields."""
    config = composed(*HYBRID, *overrides)
    before, after = plans_of(config)
    saved = after if switched_at is not None and after is not None else before
    trainer = {"switch": {"switched_at": switched_at}, "plan": json.loads(json.dumps(saved.as_dict()))}
    fields = {"folder": Path("step_1"), "config": config, "trainer": trainer, "weights_only": False, **changes}
    return trained_plan(SimpleNamespace(**fields), (before, after), which)  # type: ignore[arg-type]


SECTIONS = "precision.exceptions=[{names: ['*.in_proj'], sections: [z], precision: mxfp8}]"
WIDE = ("model.ffn_dim=128", "model.num_query_heads=8")
TO_BF16 = ("precision=nvfp4", "precision.switch.when=4", "train.steps=8", "train.global_batch_size=8")


@pytest.mark.parametrize(
    ("overrides", "options", "problem"),
    [
        (["precision=bf16"], {}, "no linear was trained with NVFP4 weights (they are in bf16)"),
        (["precision=mxfp4", *WIDE], {}, "(they are in mxfp4); export BF16 weights (--format hf; export-gguf"),
        (["precision.fprop.weight.rounding=stochastic"], {}, "fprop.weight.rounding=stochastic gives other codes"),
        (["precision.fprop.rht=16"], {}, "fprop.rht=16 transforms the weights"),
        ([SECTIONS], {}, "blocks.0.mixer.in_proj[x,B,C,dt] has a tensor scale of its own, but engines"),
        (["precision.amax=shard", "parallel.tensor=2", *WIDE], {}, "amax=shard gave each of 2 tensor-parallel"),
        (TO_BF16, {"switched_at": 0, "which": "before"}, "--plan before: there was no precision switch before"),
        (TO_BF16, {"switched_at": 0}, "no linear was trained with NVFP4 weights (they are in bf16); export BF16"),
        (TO_BF16, {"switched_at": 4}, "after the precision switch (before step 5), so its forward pass has no NVFP4"),
        (TO_BF16, {"which": "before"}, "--plan before: there was no precision switch before"),
        (["precision=nvfp4"], {"weights_only": True}, "step_1 has weights that no run has trained"),
    ],
)
def test_checkpoints_without_trained_nvfp4_weights_are_refused(overrides, options, problem):
    with pytest.raises(ValueError) as error:
        chosen(*overrides, **options)
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_the_plan_must_be_the_one_that_the_checkpoint_was_saved_with():
    assert len(chosen(*TO_BF16).nvfp4_linears()) == 8
    left = chosen(*TO_BF16, switched_at=4, which="before")
    assert left.before_switch and len(left.nvfp4_linears()) == 8
    other = plans_of(composed(*HYBRID, "precision=nvfp4", "precision.bf16_blocks.last=3"))[0]
    trainer = {"switch": {"switched_at": None}, "plan": json.loads(json.dumps(other.as_dict()))}
    with pytest.raises(ValueError, match=r"blocks\.3\.mixer\.up_proj was trained with another recipe than .* step_1"):
        chosen("precision=nvfp4", trainer=trainer)


def test_the_tensor_scale_of_each_layout_is_one_division():
    row, inverted = chosen("precision=nvfp4").nvfp4_linears()["blocks.1.mixer.up_proj"], 0
    for seed in range(20):
        weight = torch.randn(112, 64, generator=torch.Generator().manual_seed(seed))
        made = trained_weight(weight, row, torch.bfloat16)
        amax = weight.bfloat16().float().abs().max()
        (first, second) = (layout.tensors("m", made, None)[f"m.{layout.weight_scale}"] for layout in LAYOUTS.values())
        assert torch.equal(first, amax / 2688) and torch.equal(second, torch.tensor([2688.0]) / amax)
        inverted += bool(first.reciprocal() != second)
    assert inverted  # for some, one scale is not the reciprocal of the other
    weight[3, 5] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.1\.mixer\.up_proj has NaN or inf in its weight"):
        trained_weight(weight, row, torch.bfloat16)


def test_the_quantization_config_of_modelopt():
    """It has the keys of its definition. (test_nvfp4_folders.py: transformers reads that of compressed-tensors.)"""
    excluded = excluded_modules(sections_of(composed(*HYBRID).model), chosen("precision=nvfp4").nvfp4_linears())
    blocks = ("0.mixer.conv1d", "4.mixer.in_proj", "4.mixer.conv1d", "4.mixer.out_proj", "5.mixer.up_proj")
    layers = [f"backbone.layers.{name}" for name in (*blocks, "5.mixer.down_proj")]
    assert excluded == [*layers, "lm_head"]
    w4a16 = quantization_config(MODELOPT, excluded, calibrated=False)
    assert (w4a16["quant_method"], w4a16["quant_algo"], w4a16["ignore"]) == ("modelopt", "W4A16_NVFP4", excluded)
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert w4a16["config_groups"] == {"group_0": {"weights": group, "targets": ["Linear"]}}
    keys = {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": excluded}
    assert hf_quant_config(w4a16)["quantization"] == keys

    w4a4 = quantization_config(MODELOPT, excluded, calibrated=True)
    assert w4a4["quant_algo"] == "NVFP4" and w4a4["config_groups"]["group_0"]["input_activations"] == group


def excludes(layout: Layout, entry: str, module: str) -> bool:
    """Whether an entry of `ignore` makes readers of the layout leave `module` unquantized."""
    if layout is MODELOPT:  # vLLM: `exclude_module in prefix` after an exact comparison, then as a wildcard
        return re.search(".*".join(map(re.escape, entry.split("*"))), module) is not None
    return re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_exactly_the_modules_without_codes_are_excluded(layout):
    """Readers have different rules, some of which match substrings: `layers.1` must not exclude `layers.10`."""
    plan = ["precision=nvfp4", "precision.bf16_blocks.names=['blocks.1.*']", "precision.bf16_blocks.last=0"]
    config = composed(*HYBRID, "model.pattern='------------'", *plan)
    rows, sections = TrainedPlan(plans_of(config)[0], torch.bfloat16).nvfp4_linears(), sections_of(config.model)
    plain = excluded_modules(sections, rows)
    assert plain == [*(f"backbone.layers.1.mixer.{end}" for end in ("up_proj", "down_proj")), "lm_head"]
    entries = quantization_config(layout, plain, calibrated=False)["ignore"]
    quantized = [part.module for name in rows for part in sections[f"{name}.weight"]]
    assert len(quantized) == 22 and "backbone.layers.10.mixer.up_proj" in quantized
    for module in (*quantized, *plain):
        # transformers reads compressed-tensors under its own names.
        for name in (module, module.replace("backbone.", "model.")) if layout is COMPRESSED_TENSORS else (module,):
            assert any(excludes(layout, entry, name) for entry in entries) == (module in plain), name


def test_both_decoders_agree_on_every_code_and_scale_and_other_shapes_are_refused():
    codes = torch.arange(256, dtype=torch.uint8).repeat(16)[None].expand(2, -1).contiguous()
    scales = torch.arange(512).remainder(256).to(torch.uint8)[None].expand(2, -1).contiguous()
    stored = scales.view(torch.float8_e4m3fn)
    mine, other = decoded(codes, stored), block_values(codes, stored)
    assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0)) and mine.isnan().any()
    for bad in ((codes.int(), scales), (codes, scales.float()), (codes, stored[:, :5].contiguous())):
        with pytest.raises(ValueError, match=r"scales are|and scales"):
            decoded(*bad)
