"""Names of tensors, configurations and exclusions of the two layouts, as their readers want them."""

from __future__ import annotations

import json

import pytest
import torch

from exchange.hf.architectures import architecture_of
from exchange.nvfp4 import TrainedPlan, choose_plan
from exchange.nvfp4_encoder import NVFP4Encoder
from exchange.nvfp4_layouts import LAYOUTS, layout_named, layout_of
from exchange.nvfp4_reading import decoded
from megatron_fp4.quantization.nvfp4 import quantize_nvfp4
from tests.composing import plans_of
from tests.exchange.decoding import block_values, e4m3
from tests.exchange.test_nvfp4 import HYBRID, composed, switched

MODULE = "backbone.layers.1.mixer.up_proj"


def encoder(layout: str, *overrides: str, calibrated: bool = False) -> NVFP4Encoder:
    config = composed(*HYBRID, *overrides)
    trained = choose_plan(switched(*overrides), None, torch.bfloat16, 1)
    amax = {name: torch.tensor(3.0 + i) for i, name in enumerate(trained.fp4())} if calibrated else None
    return NVFP4Encoder(LAYOUTS[layout], trained, architecture_of(config.model).sections(config.model), amax)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("calibrated", [False, True])
def test_tensors_are_those_that_were_announced(layout, calibrated):
    """And of q, k and v, one tensor scale, of weights and inputs alike."""
    made, generator = encoder(layout, "precision=nvfp4", calibrated=calibrated), torch.Generator().manual_seed(1)
    sections = architecture_of(composed(*HYBRID).model).sections(composed(*HYBRID).model)
    scales = {LAYOUTS[layout].weight_scale, LAYOUTS[layout].input_scale}
    for name, parts in sections.items():
        width = [size for size in parts[0].shape[1:] if size > 1]
        ours = torch.randn(sum(part.shape[0] for part in parts), *width, generator=generator)
        found = made.tensors(name, parts, ours)
        assert [(n, t.dtype, tuple(t.shape)) for n, t in found.items()] == [tuple(s) for s in made.layout(name, parts)]
        if name.endswith("qkv_proj.weight"):
            for scale in scales:
                values = [t for n, t in found.items() if n.endswith(f".{scale}")]
                assert len(values) == (3 if calibrated or "weight" in scale else 0)
                assert all(torch.equal(value, values[0]) for value in values)


def test_the_numbers_of_modelopts_layout():
    weight = quantize_nvfp4(torch.randn(32, 64, generator=torch.Generator().manual_seed(2)))
    found = LAYOUTS["modelopt"].tensors(MODULE, weight, torch.tensor(5.0))
    assert found.keys() == {f"{MODULE}.{name}" for name in ("weight", "weight_scale", "weight_scale_2", "input_scale")}
    assert found[f"{MODULE}.weight"].dtype == torch.uint8 and found[f"{MODULE}.weight"].shape == (32, 32)
    assert found[f"{MODULE}.weight_scale"].dtype == torch.float8_e4m3fn
    assert found[f"{MODULE}.weight_scale_2"] == weight.amax / 2688 and found[f"{MODULE}.weight_scale_2"].dim() == 0
    assert found[f"{MODULE}.input_scale"] == torch.tensor(5.0) / 2688 and found[f"{MODULE}.input_scale"].dim() == 0


def test_the_numbers_of_compressed_tensors_layout():
    weight = quantize_nvfp4(torch.randn(32, 64, generator=torch.Generator().manual_seed(2)), four_over_six=True)
    found = LAYOUTS["compressed-tensors"].tensors(MODULE, weight, torch.tensor(5.0))
    names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    assert found.keys() == {f"{MODULE}.{name}" for name in names}
    assert torch.equal(found[f"{MODULE}.weight_global_scale"], torch.tensor([1536.0]) / weight.amax)
    assert torch.equal(found[f"{MODULE}.input_global_scale"], torch.tensor([2688.0 / 5]))


def test_what_modelopts_configuration_says():
    made = encoder("modelopt", "precision=nvfp4")
    config = made.config_entries()
    assert config["dtype"] == "bfloat16"
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "modelopt" and quantization["quant_algo"] == "W4A16_NVFP4"
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert quantization["config_groups"] == {"group_0": {"weights": group, "targets": ["Linear"]}}
    blocks = ("0.mixer.conv1d", "4.mixer.conv1d", "4.mixer.in_proj", "4.mixer.out_proj", "5.mixer.down_proj")
    layers = [f"backbone.layers.{name}" for name in (*blocks, "5.mixer.up_proj")]
    assert quantization["ignore"] == [*layers, "lm_head"]
    (beside,) = made.extra_files().items()
    assert beside[0] == "hf_quant_config.json"
    assert json.loads(beside[1])["quantization"] == {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": quantization["ignore"],
    }
    measured = encoder("modelopt", "precision=nvfp4", calibrated=True).config_entries()["quantization_config"]
    assert measured["quant_algo"] == "NVFP4"
    assert measured["config_groups"]["group_0"]["input_activations"] == group


def test_what_compressed_tensors_configuration_says():
    """Its own classes take it, and find the schemes W4A16 and W4A4."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import NVFP4

    for calibrated in (False, True):
        made = encoder("compressed-tensors", "precision=nvfp4", calibrated=calibrated)
        parsed = QuantizationConfig.model_validate(made.config_entries()["quantization_config"])
        assert made.extra_files() == {} and parsed.format == "nvfp4-pack-quantized"
        scheme = parsed.config_groups["group_0"]
        same = {"num_bits", "type", "strategy", "group_size", "symmetric", "dynamic"}
        assert scheme.weights.model_dump(include=same) == NVFP4["weights"].model_dump(include=same)
        if calibrated:
            assert scheme.input_activations.model_dump(include=same) == NVFP4["input_activations"].model_dump(
                include=same
            )
        else:
            assert scheme.input_activations is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_is_excluded_if_and_only_if_it_has_no_codes(layout):
    """In a model of more than ten layers, by the rules of all readers: names, wildcards, substrings, expressions."""
    plan = ["precision=nvfp4", "precision.bf16_blocks.names=['blocks.1.*']", "precision.bf16_blocks.last=0"]
    config = composed(*HYBRID, "model.pattern='------------'", *plan)
    trained = TrainedPlan(plans_of(config)[0], torch.bfloat16)
    made = NVFP4Encoder(LAYOUTS[layout], trained, architecture_of(config.model).sections(config.model))
    excluded = made.config_entries()["quantization_config"]
    for module in made.quantized:
        assert not LAYOUTS[layout].excludes(excluded, module), module
    for module in made.excluded:
        assert LAYOUTS[layout].excludes(excluded, module), module
    ends = ("up_proj", "down_proj")
    assert made.excluded == [*(f"backbone.layers.1.mixer.{end}" for end in ends), "lm_head"]
    assert len(made.quantized) == 22 and "backbone.layers.10.mixer.up_proj" in made.quantized
    excluded["ignore"].append("backbone.layers.1" if layout == "modelopt" else r"re:.*layers\.1.*")
    assert LAYOUTS[layout].excludes(excluded, "backbone.layers.11.mixer.up_proj")


@pytest.mark.parametrize("form", ["nvfp5", "modelopt", "nvfp4-gguf"])
def test_an_unknown_layout_is_refused(form):
    with pytest.raises(ValueError, match=f"--format {form} is no NVFP4 layout; choose nvfp4"):
        layout_named(form)
    assert layout_named("nvfp4") is layout_named("nvfp4-modelopt") is LAYOUTS["modelopt"]
    with pytest.raises(ValueError, match="quant_method is 'awq', not one of modelopt, compressed-tensors"):
        layout_of({"quantization_config": {"quant_method": "awq"}})
    for other in ({"ignore": []}, {"config_groups": {"group_0": {}}}, {"config_groups": [], "ignore": []}):
        with pytest.raises(ValueError, match=r"its quantization_config has no config_groups\.group_0 and ignore"):
            layout_of({"quantization_config": {"quant_method": "modelopt", **other}})
    assert layout_of({}) is None


def test_the_two_decoders_agree_and_refuse_other_shapes():
    """Every byte of codes and every scale."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(16)[None].expand(2, -1).contiguous()
    scales = torch.arange(512).remainder(256).to(torch.uint8)[None].expand(2, -1).contiguous()
    stored = scales.view(torch.float8_e4m3fn)
    mine, other = decoded(codes, stored), block_values(codes, stored)
    assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0)) and mine.isnan().any()
    assert [e4m3(byte) for byte in (0, 1, 8, 126)] == [0.0, 2.0**-9, 2.0**-6, 448.0]
    for bad in ((codes.int(), scales), (codes, scales.float())):
        with pytest.raises(ValueError, match="not uint8 and float8_e4m3fn"):
            decoded(*bad)
    with pytest.raises(ValueError, match="scales are"):
        decoded(codes, stored[:, :5].contiguous())
