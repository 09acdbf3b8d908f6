"""Which backend a run gets on other machines: tests set the compute capability and the installed software."""

from dataclasses import replace

import pytest
import torch

from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.console import plan_table
from megatron_fp4.precision import support
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.support import BackendChoice, choose_backend, emulated_linears
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.training.build import graphs_refusal
from tests.composing import changed, composed, plans_of

FOUR_OVER_SIX = {"fprop.activation.four_over_six": "absolute"}
POWERS = {"fp8_power_of_two_scales": True}
TE, TORCH = "transformer_engine", "torch"
NATIVE, CORES = "native on compute capability", "tensor cores of compute capability"


@pytest.fixture
def machine(monkeypatch):
    """Pretend that the machine has a GPU of some compute capability, and Transformer Engine installed or not."""

    def pretend(capability: tuple[int, int], missing: str | None = None, version: str = "2.20.2", cuda="12.8") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(support, "installed_version", lambda: None if missing else version)
        monkeypatch.setattr(te, "not_installed", lambda: missing)
        for name in te.FAST_MATH_VARIABLES:
            monkeypatch.delenv(name, raising=False)

    return pretend


def configured(precision: str = "nvfp4", *overrides: str, **changes) -> Config:
    return changed(composed(f"precision={precision}", *overrides), {f"precision.{k}": v for k, v in changes.items()})


def chosen(config: Config, device_type: str = "cuda") -> BackendChoice:
    return choose_backend(config, device_type, plans_of(config))


def refused(config: Config, device_type: str = "cuda") -> str:
    with pytest.raises(ConfigError) as error:
        chosen(config, device_type)
    message = str(error.value)
    assert "\n" not in message and "precision.backend=emulated" in message
    return message


@pytest.mark.parametrize(
    ("backend", "capability", "precision", "changes", "version", "why"),
    [
        (TE, (10, 0), "nvfp4", {}, "2.20.2", NATIVE),
        (TE, (9, 0), "nvfp4", {}, "2.20.2", "this GPU has 9.0"),
        (TE, (10, 0), "nvfp4", {}, "2.9.0", "needs 2.14 or newer: before, NVFP4's copies share their draws"),
        (TE, (10, 3), "nvfp4", FOUR_OVER_SIX, "2.16.1", "needs 2.17 or newer: before, there is no four-over-six"),
        (TE, (10, 3), "nvfp4", FOUR_OVER_SIX, "2.17.0+abc", NATIVE),
        (TE, (12, 0), "nvfp4", {}, "2.18.0", "before, stochastic rounding makes every gradient zero"),
        (TE, (10, 0), "nvfp4_all_the_way", {}, "2.20.2", "rounding=stochastic"),
        (TE, (10, 0), "nvfp4_best", {}, "2.20.2", NATIVE),
        (TE, (12, 0), "nvfp4_best", {}, "2.20.2", "native mxfp8 needs compute capability 10.0, 10.3"),
        (TE, (10, 0), "fp8_block", {}, "2.20.2", "power_of_two_scales"),
        (TE, (10, 0), "fp8_block", POWERS, "2.20.2", NATIVE),
        (TE, (12, 0), "fp8_block", POWERS, "2.20.2", "9.0, 10.0, 10.3"),
        (TORCH, (10, 0), "nvfp4", {}, "12.8", CORES),
        (TORCH, (12, 1), "mxfp8", {}, "12.8", CORES),
        (TORCH, (10, 0), "nvfp4", {}, "12.6", "need CUDA 12.8 and this PyTorch is built with 12.6"),
    ],
)
def test_backends_by_capability_recipe_and_version(machine, backend, capability, precision, changes, version, why):
    """`auto` is Transformer Engine if that is possible, and never `torch`."""
    machine(capability, **({"version": version} if backend == TE else {"cuda": version, "missing": "not installed"}))
    automatic, named = configured(precision, **changes), configured(precision, backend=backend, **changes)
    if why in (NATIVE, CORES):
        choice = chosen(named)
        assert choice.name == backend and why in choice.reason
        assert chosen(automatic).name == (TE if backend == TE else "emulated")
    else:
        assert why in refused(named)
        assert chosen(automatic).name == "emulated" and (backend == TORCH or why in chosen(automatic).reason)
    assert "the run is on cpu" in refused(named, "cpu")


def test_emulated_without_a_gpu_the_package_or_a_quantized_recipe(machine):
    machine((10, 0), missing="transformer_engine is not installed")
    assert chosen(configured(backend="emulated")) == BackendChoice("emulated", "set by precision.backend")
    assert chosen(configured("bf16")).reason == "nothing is quantized"
    assert chosen(configured(backend="emulated")).open().sums == "fp32"
    assert chosen(configured(sums="blackwell")).open().sums == "blackwell"
    assert isinstance(chosen(configured(backend="torch")).open(), TorchBackend)
    assert "not installed" in chosen(configured()).reason
    assert "not installed" in refused(configured(backend=TE))
    assert chosen(configured(), "cpu").reason.endswith("the run is on cpu")


def test_exceptions_and_the_target_of_a_switch_need_the_backend_too(machine):
    machine((10, 0))
    exception = "precision.exceptions=[{names: ['*.out_proj'], precision: %s}]"
    of_bf16 = [configured("bf16", "precision.switch.when=never", exception % name) for name in ("mxfp4", "nvfp4")]
    assert "exceptions[0].precision=mxfp4: precision.fprop.activation.format=mxfp4" in chosen(of_bf16[0]).reason
    assert chosen(of_bf16[1]).name == TE
    odd = replace(composed("precision=mxfp4").precision, name="odd")
    message = refused(replace(configured(backend="torch"), after_switch=odd))
    assert "precision.switch.target=bf16: precision.fprop.activation.format=mxfp4" in message


def test_experts_whose_width_128_does_not_divide_are_emulated_and_named(machine):
    machine((10, 0))
    for model, emulated, eager in (("nemotron_3_nano", 38, None), ("moe_tiny", 0, "how many tokens each expert gets")):
        config = configured("nvfp4", f"model={model}", "run.device=cuda")
        plan = plans_of(config)[0]
        whys = emulated_linears(plan, TE)
        assert chosen(config).name == TE and len(whys) == emulated == str(whys).count(": '1856 ")
        table = plan_table(plan, "nvfp4", whys)
        assert any("emulated: 1856 inputs" in cell for cell in table.columns[4].cells) == bool(emulated)
        refusal = graphs_refusal(config, 1, "cuda", TE, [plan])
        assert (refusal is None) if eager is None else eager in (refusal or "")


def test_fast_math_is_refused(machine, monkeypatch):
    for variable in te.FAST_MATH_VARIABLES:
        machine((10, 0))
        monkeypatch.setenv(variable, "0")
        assert chosen(configured()).name == TE
        monkeypatch.setenv(variable, "1")
        assert f"{variable} is set" in refused(configured())
