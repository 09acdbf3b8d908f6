"""Which backend a run gets, on machines that are not here: capability and installation are put in."""

from dataclasses import replace

import pytest
import torch

from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.precision import backend_support
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend_support import BackendChoice, choose_backend
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from tests.composing import CONFIGS, changed, composed, plans_of


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be on a machine with a GPU of some compute capability, and Transformer Engine installed or not."""

    def pretend(capability: tuple[int, int], missing: str | None = None, version: str = "2.20.2") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(backend_support, "installed_version", lambda: None if missing else version)
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
    return choose_backend(config, device_type, plans_of(config))


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)])
@pytest.mark.parametrize("backend", ["auto", "transformer_engine"])
def test_nvfp4_is_native_on_blackwell(machine, capability, backend):
    machine(capability)
    choice = chosen(configured(backend=backend))
    assert choice.name == "transformer_engine"
    assert f"{capability[0]}.{capability[1]}" in choice.reason


@pytest.mark.parametrize(
    ("capability", "why"),
    [
        ((8, 0), "this GPU has 8.0"),
        ((9, 0), "this GPU has 9.0"),
        ((11, 0), "this GPU has 11.0"),
    ],
)
def test_nvfp4_elsewhere(machine, capability, why):
    machine(capability)
    choice = chosen(configured())
    assert choice.name == "emulated" and why in choice.reason
    with pytest.raises(ConfigError) as error:
        chosen(configured(backend="transformer_engine"))
    assert why in str(error.value) and "precision.backend=emulated" in str(error.value) and "\n" not in str(error.value)


NEAREST = {"dgrad.gradient.rounding": "nearest", "wgrad.gradient.rounding": "nearest"}
FOUR_OVER_SIX = {"fprop.activation.four_over_six": True}


@pytest.mark.parametrize(
    ("capability", "changes", "version", "why"),
    [
        (
            (10, 0),
            {},
            "2.9.0",
            "needs 2.14 or newer: before 2.10 GEMMs want a workspace from their caller, before 2.1",
        ),
        ((10, 0), {}, "2.13.0", "needs 2.14 or newer: before 2.14 NVFP4 block scales are rounded in another order"),
        ((10, 0), {}, "2.14.1", None),
        ((10, 3), FOUR_OVER_SIX, "2.16.1", "needs 2.17 or newer: before 2.17 there is no four-over-six"),
        ((10, 3), FOUR_OVER_SIX, "2.17.0+abc", None),
        ((12, 0), {}, "2.18.0", "needs 2.19 or newer: before 2.19 stochastic rounding makes every gradient zero"),
        ((12, 1), {}, "2.15.0", "before 2.16 the Hadamard transform takes a kernel that 12.x cannot run, before 2.19"),
        ((12, 0), {}, "2.19.0", None),
        ((12, 0), NEAREST, "2.16.0", None),
        ((12, 0), {**NEAREST, "wgrad.rht": 0}, "2.14.0", None),
    ],
)
def test_releases_that_lack_something_are_refused_by_name(machine, capability, changes, version, why):
    machine(capability, version=version)
    choice = chosen(configured(**changes))
    assert (choice.name == "transformer_engine") == (why is None)
    if why is not None:
        assert f"Transformer Engine {version} is installed and precision=nvfp4 needs" in choice.reason
        assert why in choice.reason
        with pytest.raises(ConfigError) as error:
            chosen(configured(backend="transformer_engine", **changes))
        assert why in str(error.value) and "\n" not in str(error.value)


def test_fp8_blocks_need_less(machine):
    machine((9, 0), version="2.9.0")
    assert "precision=fp8_block needs 2.10 or newer" in chosen(configured("fp8_block")).reason
    machine((9, 0), version="2.10.0")
    assert chosen(configured("fp8_block")).name == "transformer_engine"


def test_the_version_of_a_package_that_is_not_here():
    if te.importlib.util.find_spec("transformer_engine") is None:
        assert backend_support.installed_version() is None


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
    for precision in ("nvfp4_nemotron_3", "nvfp4_best", "nvfp4_4over6_1x16"):
        assert chosen(configured(precision)).name == "transformer_engine"
    names = "precision.exceptions=[{names: ['*.out_proj'], precision: %s}]"
    config = compose_config(["precision=bf16", "precision.switch.when=never", names % "mxfp4"], CONFIGS)
    choice = chosen(config)
    assert choice.name == "emulated"
    assert "precision.exceptions[0].precision=mxfp4: precision.fprop.activation.format=mxfp4" in choice.reason
    config = compose_config(["precision=bf16", "precision.switch.when=never", names % "nvfp4"], CONFIGS)
    assert chosen(config).name == "transformer_engine"
    machine((9, 0))
    assert "native NVFP4" in chosen(config).reason
    machine((12, 0))
    assert "native MXFP8 needs compute capability 10.x" in chosen(configured("nvfp4_best")).reason
    assert "it cannot do precision.rht_signs=fresh" in chosen(configured("nvfp4_quartet2")).reason


def test_the_target_of_a_switch_counts(machine):
    machine((10, 0))
    config = configured()
    odd = replace(composed("precision=mxfp4").precision, name="odd")
    assert "precision.switch.target=bf16" in chosen(replace(config, after_switch=odd)).reason
    assert chosen(replace(config, after_switch=None)).name == "transformer_engine"


@pytest.mark.parametrize("variable", te.FAST_MATH_VARIABLES)
def test_fast_math_is_refused(machine, monkeypatch, variable):
    machine((10, 0))
    monkeypatch.setenv(variable, "0")
    assert chosen(configured()).name == "transformer_engine"
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=f"{variable} is set"):
        chosen(configured())
    assert chosen(configured(backend="emulated")).name == "emulated"


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)])
def test_torch_on_blackwell_needs_no_package_and_is_never_chosen_by_auto(machine, monkeypatch, capability):
    machine(capability, missing="transformer_engine is not installed")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    choice = chosen(configured(backend="torch"))
    assert choice.name == "torch" and f"{capability[0]}.{capability[1]}" in choice.reason
    assert isinstance(choice.open(), TorchBackend)
    for precision in ("mxfp8", "nvfp4_nemotron_3", "nvfp4_best"):
        assert chosen(configured(precision, backend="torch")).name == "torch"
    assert chosen(configured()).name == "emulated"


@pytest.mark.parametrize(
    ("config", "capability", "cuda", "why"),
    [
        (configured, (9, 0), "12.8", "this GPU has 9.0"),
        (configured, (11, 0), "13.0", "this GPU has 11.0"),
        (configured, (10, 0), "12.6", "built with 12.6"),
        (lambda **keys: configured("mxfp8", **keys), (9, 0), "12.8", "this GPU has 9.0"),
        (lambda **keys: configured("mxfp4", **keys), (10, 0), "12.8", "precision.fprop.activation.format=mxfp4"),
    ],
)
def test_torch_elsewhere(machine, monkeypatch, config, capability, cuda, why):
    machine(capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError) as error:
        chosen(config(backend="torch"))
    assert why in str(error.value) and "precision.backend=emulated" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="the run is on cpu"):
        chosen(configured(backend="torch"), "cpu")


def test_torch_with_a_target_of_a_switch(machine, monkeypatch):
    machine((10, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    config = configured(backend="torch")
    odd = replace(composed("precision=mxfp4").precision, name="odd")
    with pytest.raises(ConfigError, match=r"precision.switch.target=bf16: precision.fprop.activation.format=mxfp4"):
        chosen(replace(config, after_switch=odd))
    assert chosen(replace(config, after_switch=None)).name == "torch"


def test_the_package_is_not_here():
    """On a machine without it nothing imports it, and asking says how to get it."""
    if te.importlib.util.find_spec("transformer_engine") is None:
        assert "pip install" in te.not_installed()


def test_ranks_must_agree(monkeypatch):
    emulated, native = BackendChoice("emulated", "not installed"), BackendChoice("transformer_engine", "native")
    monkeypatch.setattr(backend_support.dist, "get_world_size", lambda: 2)

    def gather(others: list, mine: BackendChoice) -> None:
        others[:] = [native, mine]

    monkeypatch.setattr(backend_support.dist, "all_gather_object", gather)
    assert backend_support.agreed_backend(native) is native
    with pytest.raises(ConfigError, match="rank 1"):
        backend_support.agreed_backend(emulated)
