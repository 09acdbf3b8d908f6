"""What Transformer Engine and torch's scaled_mm cannot do, refused before anything is built."""

import pytest

from assembly import check as validate
from megatron_fp4.precision import torch_scaled_mm
from tests.checks.composed import changed, composed, refusal


@pytest.mark.parametrize(
    ("changes", "value", "remedy"),
    [
        ({"compute_dtype": "float32"}, "precision.compute_dtype=float32", "use bfloat16"),
        ({"rht_signs": "fresh"}, "precision.rht_signs=fresh", "use fixed"),
        ({"wgrad.rht": 32}, "precision.wgrad.rht=32", "use 0 or 16"),
        ({"fprop.rht": 16}, "precision.fprop.rht=16", "use 0, or precision.backend=emulated"),
        ({"fprop.weight.format": "bf16"}, "activation.format=nvfp4 and weight.format=bf16", "make them equal"),
        (
            {"fprop.weight.format": "mxfp4", "fprop.weight.block": "1x32"},
            "precision.fprop.weight.format=mxfp4",
            "backend=emulated",
        ),
        ({"fprop.activation.rounding": "stochastic"}, "fprop.activation.rounding=stochastic", "use nearest"),
        ({"wgrad.activation.rounding": "stochastic"}, "wgrad.activation.rounding=stochastic", "use nearest"),
        ({"wgrad.gradient.block": "16x16"}, "precision.wgrad.gradient.block=16x16", "use 1x16"),
        ({"wgrad.activation.four_over_six": True}, "wgrad.activation.four_over_six=true with rht=16", "set one of"),
        ({"dgrad.gradient.four_over_six": True}, "four_over_six=true with rounding=stochastic", "set one of"),
        (
            {"wgrad.activation.reuse_fprop": True, "wgrad.rht": 0},
            "wgrad.activation.reuse_fprop=true",
            "set it to false",
        ),
        (
            {"dgrad.weight.source": "forward"},
            "dgrad.weight.source=forward",
            "use tensor, or precision.backend=emulated",
        ),
    ],
)
def test_what_transformer_engine_cannot_do(changes, value, remedy):
    keys = {f"precision.{key}": change for key, change in changes.items()}
    message = refusal({"precision.backend": "transformer_engine", **keys}, device_type="cuda")
    assert value in message
    assert remedy in message
    validate(changed(composed(), {"precision.backend": "transformer_engine"}), 1, "cuda")


@pytest.mark.parametrize(
    ("changes", "value", "remedy"),
    [
        ({"compute_dtype": "float32"}, "precision.compute_dtype=float32", "use bfloat16"),
        ({"fprop.weight.format": "bf16"}, "activation.format=nvfp4 and weight.format=bf16", "make them equal"),
        (
            {"fprop.weight.format": "fp8", "fprop.weight.block": "128x128"},
            "precision.fprop.weight.format=fp8",
            "use one of them or bf16, or precision.backend=emulated",
        ),
        (
            {"fprop.weight.format": "mxfp8", "fprop.weight.block": "32x32"},
            "activation.format=nvfp4 and weight.format=mxfp8 in one GEMM",
            "make them equal",
        ),
        (
            {"wgrad.activation.reuse_fprop": True, "wgrad.rht": 0},
            "wgrad.activation.reuse_fprop=true",
            "set it to false",
        ),
    ],
)
def test_what_scaled_mm_cannot_do(changes, value, remedy):
    keys = {f"precision.{key}": change for key, change in changes.items()}
    message = refusal({"precision.backend": "torch", **keys}, device_type="cuda")
    assert value in message
    assert remedy in message


def test_what_only_our_quantizers_can_do():
    """Transformer Engine refuses each of these."""
    for changes in (
        {"rht_signs": "fresh"},
        {"wgrad.rht": 128},
        {"fprop.activation.rounding": "stochastic"},
        {"wgrad.gradient.block": "16x16"},
        {"wgrad.activation.four_over_six": True},
    ):
        keys = {f"precision.{key}": change for key, change in {"backend": "torch", **changes}.items()}
        validate(changed(composed(), keys), 1, "cuda")
    validate(changed(composed(), {"precision.backend": "torch", "model.hidden_dim": 272}), 1, "cuda")


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"model.hidden_dim": 272}, "model.hidden_dim=272"),
        ({"model.ffn_dim": 1040, "parallel.tensor": 1}, "model.ffn_dim=1040"),
    ],
)
def test_sizes_that_an_fp4_gemm_cannot_take(changes, value):
    message = refusal({"precision.backend": "transformer_engine", **changes}, device_type="cuda")
    assert value in message
    assert "multiple of 32" in message
    assert "backend=emulated" in message
    validate(changed(composed(), changes), 1, "cuda")


def test_transformer_engine_is_asked_about_exceptions():
    native = {"precision.backend": "transformer_engine"}
    exceptions = "precision.exceptions=[{names: ['*.out_proj'], precision: mxfp4}]"
    message = refusal(native, exceptions, device_type="cuda")
    assert "precision.exceptions[0].precision=mxfp4: precision.fprop.activation.format=mxfp4" in message
    for name in ("nvfp4_nemotron_3", "mxfp8"):
        validate(changed(composed(f"precision={name}"), native), 1, "cuda")


def test_the_backend_torch_takes_the_formats_that_it_has(monkeypatch):
    changes = {"precision.backend": "torch"}
    assert "it multiplies nvfp4 and mxfp8;" in refusal(changes, "precision=mxfp4", device_type="cuda")
    monkeypatch.setitem(torch_scaled_mm.FORMATS, "mxfp4", torch_scaled_mm.FORMATS["mxfp8"])
    validate(changed(composed("precision=mxfp4"), changes), 1, "cuda")
    assert "it multiplies nvfp4 and mxfp8 and mxfp4;" in refusal(changes, "precision=fp8_block", device_type="cuda")
