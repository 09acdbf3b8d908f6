"""Which backend a run gets, on machines that are not here: capability and installation are put in."""

from dataclasses import replace

import pytest
import torch

from megatron_fp4 import backend_choice
from megatron_fp4.backend_choice import BackendChoice, choose_backend
from megatron_fp4.compose import compose_config, precision_config
from megatron_fp4.config import Config, ConfigError
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.emulated import EMULATED
from tests.test_validate import CONFIGS, changed, composed


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be on a machine with a GPU of some compute capability, and Transformer Engine installed or not."""

    def pretend(capability: tuple[int, int], missing: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(te, "not_installed", lambda: missing)
        for name in te.FAST_MATH_VARIABLES:
            monkeypatch.delenv(name, raising=False)

    return pretend


def configured(precision: str = "nvfp4", **changes) -> Config:
    return changed(composed(f"precision={precision}"), {f"precision.{k}": v for k, v in changes.items()})


def with_power_of_two_scales() -> Config:
    names = ("fprop.activation", "fprop.weight", "dgrad.gradient", "dgrad.weight", "wgrad.gradient", "wgrad.activation")
    config = configured("fp8_block")
    return changed(config, {f"precision.{name}.power_of_two_scales": True for name in names})


def chosen(config: Config, device_type: str = "cuda") -> BackendChoice:
    target = precision_config(config.precision.switch.target, config, CONFIGS)
    return choose_backend(config, target, device_type)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
@pytest.mark.parametrize("backend", ["auto", "transformer_engine"])
def test_nvfp4_is_native_on_data_centre_blackwell(machine, capability, backend):
    machine(capability)
    choice = chosen(configured(backend=backend))
    assert choice.name == "transformer_engine"
    assert f"{capability[0]}.{capability[1]}" in choice.reason


@pytest.mark.parametrize(
    ("capability", "why"),
    [
        ((8, 0), "this GPU has 8.0"),
        ((9, 0), "this GPU has 9.0"),
        ((11, 0), "crash or round everything to zero"),
        ((12, 0), "crash or round everything to zero"),
        ((12, 1), "this GPU has 12.1"),
    ],
)
def test_nvfp4_elsewhere(machine, capability, why):
    machine(capability)
    choice = chosen(configured())
    assert choice.name == "emulated" and why in choice.reason
    with pytest.raises(ConfigError) as error:
        chosen(configured(backend="transformer_engine"))
    assert why in str(error.value) and "precision.backend=emulated" in str(error.value) and "\n" not in str(error.value)


def test_fp8_blocks_are_native_on_hopper_and_blackwell(machine):
    for capability in ((9, 0), (10, 0), (10, 3)):
        machine(capability)
        assert chosen(with_power_of_two_scales()).name == "transformer_engine"
    machine((9, 0))
    assert chosen(configured("fp8_block")).name == "transformer_engine"
    machine((10, 0))
    choice = chosen(configured("fp8_block"))
    assert choice.name == "emulated" and "power_of_two_scales" in choice.reason
    for capability in ((8, 9), (12, 0)):
        machine(capability)
        assert "9.0 or 10.x" in chosen(with_power_of_two_scales()).reason


def test_emulated_is_emulated_and_bf16_needs_nobody(machine):
    machine((10, 0))
    assert chosen(configured(backend="emulated")) == BackendChoice("emulated", "as precision.backend says")
    assert chosen(configured("bf16")).reason == "nothing is quantized"
    assert chosen(configured(backend="emulated")).open() is EMULATED


def test_without_a_gpu_or_the_package(machine):
    machine((10, 0), missing="transformer_engine is not installed")
    assert "not installed" in chosen(configured()).reason
    with pytest.raises(ConfigError, match="not installed"):
        chosen(configured(backend="transformer_engine"))
    assert chosen(configured(), "cpu").reason.endswith("the run is on cpu")


def test_what_it_cannot_compute_is_emulated_under_auto(machine):
    machine((10, 0))
    choice = chosen(configured(**{"wgrad.rht": 32}))
    assert choice.name == "emulated" and "precision.wgrad.rht=32" in choice.reason
    assert "mxfp4" in chosen(configured("mxfp4")).reason
    assert "rounding=stochastic" in chosen(configured("nvfp4_all_the_way")).reason


@pytest.mark.parametrize(
    ("capability", "native"), [((10, 0), True), ((10, 3), True), ((9, 0), False), ((12, 0), False)]
)
def test_mxfp8_is_native_on_data_centre_blackwell_alone(machine, capability, native):
    machine(capability)
    choice = chosen(configured("mxfp8"))
    assert choice.name == ("transformer_engine" if native else "emulated")
    assert native or "native MXFP8 needs compute capability 10.x" in choice.reason


def test_the_recipes_of_exceptions_count(machine):
    machine((10, 0))
    assert chosen(configured("nvfp4_nemotron_3")).name == "transformer_engine"
    names = "precision.exceptions=[{names: ['*.out_proj'], precision: %s}]"
    config = compose_config(["precision=bf16", "precision.switch.when=never", names % "mxfp4"], CONFIGS)
    choice = choose_backend(config, config.precision, "cuda")
    assert choice.name == "emulated"
    assert "precision.exceptions[0].precision=mxfp4: precision.fprop.activation.format=mxfp4" in choice.reason
    config = compose_config(["precision=bf16", "precision.switch.when=never", names % "nvfp4"], CONFIGS)
    assert choose_backend(config, config.precision, "cuda").name == "transformer_engine"
    machine((9, 0))
    assert "native NVFP4" in choose_backend(config, config.precision, "cuda").reason


def test_the_target_of_a_switch_counts(machine):
    machine((10, 0))
    config = configured()
    odd = replace(precision_config("mxfp4", config, CONFIGS), name="odd")
    assert "precision.switch.target=bf16" in choose_backend(config, odd, "cuda").reason
    never = changed(config, {"precision.switch.when": "never"})
    assert choose_backend(never, odd, "cuda").name == "transformer_engine"


@pytest.mark.parametrize("variable", te.FAST_MATH_VARIABLES)
def test_fast_math_is_refused(machine, monkeypatch, variable):
    machine((10, 0))
    monkeypatch.setenv(variable, "0")
    assert chosen(configured()).name == "transformer_engine"
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=f"{variable} is set"):
        chosen(configured())
    assert chosen(configured(backend="emulated")).name == "emulated"


def test_the_package_is_not_here():
    """On a machine without it nothing imports it, and asking says how to get it."""
    if te.importlib.util.find_spec("transformer_engine") is None:
        assert "pip install" in te.not_installed()


def test_ranks_must_agree(monkeypatch):
    emulated, native = BackendChoice("emulated", "not installed"), BackendChoice("transformer_engine", "native")
    monkeypatch.setattr(backend_choice.dist, "get_world_size", lambda: 2)

    def gather(others: list, mine: BackendChoice) -> None:
        others[:] = [native, mine]

    monkeypatch.setattr(backend_choice.dist, "all_gather_object", gather)
    assert backend_choice.agreed_backend(native) is native
    with pytest.raises(ConfigError, match="rank 1"):
        backend_choice.agreed_backend(emulated)
