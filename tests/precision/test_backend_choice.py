"""Which backend a run gets, on machines that are not here: capability and installation are put in."""

from dataclasses import replace

import pytest
import torch

from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.precision import support
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.support import BackendChoice, choose_backend
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from tests.composing import changed, composed, plans_of

NEAREST = {"dgrad.gradient.rounding": "nearest", "wgrad.gradient.rounding": "nearest"}
FOUR_OVER_SIX = {"fprop.activation.four_over_six": "absolute"}
POWERS = {"fp8_power_of_two_scales": True}
NATIVE = "native on compute capability"
OUT_PROJ = "precision.exceptions=[{names: ['*.out_proj'], precision: %s}]"


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be on a machine with a GPU of some compute capability, and Transformer Engine installed or not."""

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
    ("capability", "precision", "changes", "version", "why"),
    [
        ((10, 0), "nvfp4", {}, "2.20.2", NATIVE),
        ((9, 0), "nvfp4", {}, "2.20.2", "this GPU has 9.0"),
        ((10, 0), "nvfp4", {}, "2.9.0", "needs 2.14 or newer: before, NVFP4 block scales are rounded in another order"),
        ((10, 3), "nvfp4", FOUR_OVER_SIX, "2.16.1", "needs 2.17 or newer: before, there is no four-over-six"),
        ((10, 3), "nvfp4", FOUR_OVER_SIX, "2.17.0+abc", NATIVE),
        ((12, 0), "nvfp4", {}, "2.18.0", "before, stochastic rounding makes every gradient zero"),
        ((12, 1), "nvfp4", NEAREST, "2.15.0", "before, the Hadamard transform takes a kernel that 12.x cannot run"),
        ((12, 0), "nvfp4", {**NEAREST, "wgrad.rht": 0}, "2.14.0", NATIVE),
        ((10, 0), "nvfp4", {"wgrad.rht": 32}, "2.20.2", "it cannot do precision.wgrad.rht=32"),
        ((10, 0), "nvfp4_all_the_way", {}, "2.20.2", "rounding=stochastic"),
        ((10, 0), "nvfp4_quartet2", {}, "2.20.2", "it cannot do precision.rht_signs=fresh"),
        ((10, 0), "nvfp4_best", {}, "2.20.2", NATIVE),
        ((12, 0), "nvfp4_best", {}, "2.20.2", "native mxfp8 needs compute capability 10.0, 10.3"),
        ((10, 3), "mxfp8", {}, "2.20.2", NATIVE),
        ((9, 0), "fp8_block", {}, "2.9.0", "fp8_block needs 2.10 or newer"),
        ((10, 0), "fp8_block", {}, "2.20.2", "power_of_two_scales"),
        ((10, 0), "fp8_block", POWERS, "2.20.2", NATIVE),
        ((12, 0), "fp8_block", POWERS, "2.20.2", "9.0, 10.0, 10.3"),
    ],
)
def test_transformer_engine_where_it_computes_what_the_reference_does(
    machine, capability, precision, changes, version, why
):
    machine(capability, version=version)
    choice = chosen(configured(precision, **changes))
    assert (choice.name == "transformer_engine") == (why == NATIVE) and why in choice.reason
    if why == NATIVE:
        assert chosen(configured(precision, backend="transformer_engine", **changes)) == choice
    else:
        assert why in refused(configured(precision, backend="transformer_engine", **changes))


@pytest.mark.parametrize(
    ("capability", "precision", "cuda", "why"),
    [
        ((10, 0), "nvfp4", "12.8", "tensor cores of compute capability 10.0"),
        ((12, 1), "mxfp8", "12.8", "tensor cores of"),
        ((11, 0), "nvfp4", "13.0", "this GPU has 11.0"),
        ((10, 0), "nvfp4", "12.6", "need CUDA 12.8 and this PyTorch is built with 12.6"),
        ((10, 0), "mxfp4", "12.8", "precision.fprop.activation.format=mxfp4"),
    ],
)
def test_torch_needs_no_package_and_is_never_chosen_by_auto(machine, capability, precision, cuda, why):
    machine(capability, missing="transformer_engine is not installed", cuda=cuda)
    config = configured(precision, backend="torch")
    if "tensor cores" in why:
        choice = chosen(config)
        assert choice.name == "torch" and why in choice.reason and isinstance(choice.open(), TorchBackend)
        assert chosen(configured(precision)).name == "emulated"
    else:
        assert why in refused(config)
    assert "the run is on cpu" in refused(configured(backend="torch"), "cpu")


def test_without_a_gpu_the_package_or_anything_quantized(machine):
    machine((10, 0), missing="transformer_engine is not installed")
    assert chosen(configured(backend="emulated")) == BackendChoice("emulated", "as precision.backend says")
    assert chosen(configured("bf16")).reason == "nothing is quantized"
    assert chosen(configured(backend="emulated")).open() is EMULATED
    assert "not installed" in chosen(configured()).reason
    assert "not installed" in refused(configured(backend="transformer_engine"))
    assert chosen(configured(), "cpu").reason.endswith("the run is on cpu")


def test_exceptions_and_the_target_of_a_switch_count(machine):
    machine((10, 0))
    of_bf16 = [configured("bf16", "precision.switch.when=never", OUT_PROJ % name) for name in ("mxfp4", "nvfp4")]
    assert "exceptions[0].precision=mxfp4: precision.fprop.activation.format=mxfp4" in chosen(of_bf16[0]).reason
    assert chosen(of_bf16[1]).name == "transformer_engine"
    odd = replace(composed("precision=mxfp4").precision, name="odd")
    for backend in ("auto", "torch"):
        config = replace(configured(backend=backend), after_switch=odd)
        message = chosen(config).reason if backend == "auto" else refused(config)
        assert "precision.switch.target=bf16: precision.fprop.activation.format=mxfp4" in message
        assert chosen(replace(config, after_switch=None)).name != "emulated"


@pytest.mark.parametrize("variable", te.FAST_MATH_VARIABLES)
def test_fast_math_is_refused(machine, monkeypatch, variable):
    machine((10, 0))
    monkeypatch.setenv(variable, "0")
    assert chosen(configured()).name == "transformer_engine"
    monkeypatch.setenv(variable, "1")
    assert f"{variable} is set" in refused(configured())
    assert chosen(configured(backend="emulated")).name == "emulated"


def test_ranks_must_agree(monkeypatch):
    emulated, native = BackendChoice("emulated", "not installed"), BackendChoice("transformer_engine", "native")
    monkeypatch.setattr(support.dist, "get_world_size", lambda: 2)

    def gather(others: list, mine: BackendChoice) -> None:
        others[:] = [native, mine]

    monkeypatch.setattr(support.dist, "all_gather_object", gather)
    assert support.agreed_backend(native) is native
    with pytest.raises(ConfigError, match="rank 1"):
        support.agreed_backend(emulated)
