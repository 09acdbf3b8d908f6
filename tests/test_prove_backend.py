"""scripts/prove_backend.py on this machine: what it lists, what it notices, and its exit codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config
from megatron_fp4.precision.backend_support import BACKENDS
from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.quantization import mxfp8, nvfp4
from megatron_fp4.quantization.elements import round_e2m1_stochastic, to_e4m3, to_ue8m0_up
from pretrain import CONFIGS
from scripts import prove_backend
from scripts.prove import environment
from scripts.prove.specification import properties


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(prove_backend.SHAPES, "cpu", [(128, 128, 144, 2)])


@pytest.mark.slow
def test_everything_agrees_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_USE_FAST_MATH", "1")
    assert prove_backend.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("### Proof of the backends on CPU")
    assert "All that was tested agrees." in printed
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line[:1] == "|"]
    compared = {(row[0], row[1]): row for row in rows if len(row) == 7}
    for precision in ("nvfp4", "mxfp4", "fp8_block"):
        row = compared[precision, "emulated"]
        assert row[2].endswith(", 0 faults") and int(row[2].split(",")[0]) > 8 and row[3] == "yes"
        assert all(0 <= float(error) < 4e-3 for error in row[4:])
        for name in list(BACKENDS)[1:]:
            assert "not tested: " in compared[precision, name][2]
    assert "the run is on cpu" in compared["nvfp4", "transformer_engine"][2]
    fair = {row[1]: row[2:] for row in rows if row[0] == "nvfp4, emulated" and len(row) == 4}
    for name in ("dgrad_gradient", "wgrad_gradient"):
        assert abs(float(fair[name][0])) < 0.01 and abs(float(fair[name][1]) - 1) < 0.05
    assert ["NVTE_USE_FAST_MATH", "1"] in [row[:2] for row in rows]
    timed = {row[1]: row for row in rows if row[0] == "128 tokens, 128 -> 144"}
    assert {"bf16", "nvfp4, emulated", "mxfp4, emulated", "fp8_block, emulated"} <= timed.keys()
    assert timed["bf16"][3] == "1.00" and "**on a CPU**" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "seen"),
    [
        (lambda made: made * 1.02, "fprop product: relative error 2."),
        (lambda made: made.nan_to_num(), "NaN and inf: nan in x disappears"),
    ],
)
def test_what_does_not_agree_is_named(spoil, seen, capsys, monkeypatch) -> None:
    gemm = EmulatedBackend.gemm

    def spoiled(self: EmulatedBackend, *arguments: Any) -> Tensor:
        return spoil(gemm(self, *arguments))

    monkeypatch.setattr(EmulatedBackend, "gemm", spoiled)
    assert prove_backend.main(["--precision", "nvfp4", "--backend", "emulated"]) == 1
    printed = capsys.readouterr().out
    assert "faults.**" in printed and "All that was tested" not in printed
    assert any(line.startswith("- emulated: nvfp4, 128 tokens") and seen in line for line in printed.splitlines())


@pytest.mark.slow
def test_a_kernel_that_fails_is_a_fault(capsys, monkeypatch) -> None:
    def failing(self: EmulatedBackend, *arguments: Any) -> Tensor:
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(EmulatedBackend, "gemm", failing)
    assert prove_backend.main(["--precision", "nvfp4", "--backend", "emulated"]) == 1
    assert "kernels: failed: no kernel image" in capsys.readouterr().out


def test_the_reference_is_judged_too(monkeypatch) -> None:
    cpu = torch.device("cpu")
    assert all(holds for _, holds in properties(cpu))
    monkeypatch.setattr(nvfp4, "round_e2m1_nearest", lambda x: round_e2m1_stochastic(x, torch.full_like(x, 0.45)))
    assert [what for what, holds in properties(cpu) if not holds] == ["NVFP4: codes are the nearest of all 15"]


@pytest.mark.parametrize(
    ("name", "wrong", "seen"),
    [
        ("to_ue8m0_up", lambda x: to_ue8m0_up(x) + 1, "MXFP8: scales are the least powers of two that clip nothing"),
        ("to_ue8m0_up", lambda x: to_ue8m0_up(x) - 1, "MXFP8: scales are the least powers of two that clip nothing"),
        ("to_e4m3", lambda x: to_e4m3(x * 1.03), "MXFP8: codes are the nearest E4M3 numbers"),
    ],
)
def test_the_reference_of_mxfp8_is_judged_too(name, wrong, seen, monkeypatch) -> None:
    monkeypatch.setattr(mxfp8, name, wrong)
    failed = [what for what, holds in properties(torch.device("cpu")) if not holds]
    assert seen in failed and all(what.startswith("MXFP8") for what in failed)


@pytest.mark.parametrize("value", ["/home/someone/cache", "~/cache", "caches/triton"])
def test_paths_stay_on_the_machine(value, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", value)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = {name: shown for name, shown, _ in environment.switches()}
    assert found["TRITON_CACHE_DIR"] == "set" and found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def shapes_of(config: Config, device_type: str) -> set[prove_backend.Shape]:
    cases = prove_backend.cases_of(config, True, device_type)
    return {(case.tokens, case.inputs, case.outputs, case.num_groups) for case in cases}


def test_the_shapes_of_a_model() -> None:
    config = compose_config(["model=tiny", "parallel.tensor=2"], CONFIGS)
    shapes = shapes_of(config, "cuda")
    model = config.model
    tokens = config.train.micro_batch_size * config.train.sequence_length
    in_proj = 2 * model.mamba_inner_dim + 2 * model.mamba_num_groups * model.mamba_state_dim + model.mamba_num_heads
    assert (tokens, model.hidden_dim, in_proj // 2, 1) in shapes
    assert (tokens, model.ffn_dim // 2, model.hidden_dim, 1) in shapes
    assert len(shapes) == 6  # two of each kind of block
    assert {shape[0] for shape in shapes_of(config, "cpu")} == {256}


def test_every_linear_has_the_recipe_that_the_plan_gives_it() -> None:
    """Mamba's output projection in MXFP8, attention in BF16, the rest in NVFP4."""
    config = compose_config(["precision=nvfp4_nemotron_3", "model=tiny"], CONFIGS)
    model = config.model
    found = {(case.recipe.name, case.inputs, case.outputs) for case in prove_backend.cases_of(config, True, "cpu")}
    in_proj = 2 * model.mamba_inner_dim + 2 * model.mamba_num_groups * model.mamba_state_dim + model.mamba_num_heads
    assert found == {
        ("nvfp4_nemotron_3", model.hidden_dim, in_proj),
        ("mxfp8", model.mamba_inner_dim, model.hidden_dim),
        ("nvfp4_nemotron_3", model.hidden_dim, model.ffn_dim),
        ("nvfp4_nemotron_3", model.ffn_dim, model.hidden_dim),
    }
    without_a_model = {case.recipe.name for case in prove_backend.cases_of(config, False, "cpu")}
    assert without_a_model == {"nvfp4_nemotron_3", "mxfp8"}


def test_an_exception_is_proven_and_timed_by_its_own_recipe(capsys) -> None:
    assert prove_backend.main(["--precision", "nvfp4_nemotron_3", "--backend", "emulated"]) == 0
    printed = capsys.readouterr().out
    for label in ("nvfp4_nemotron_3, emulated", "nvfp4_nemotron_3: mxfp8, emulated"):
        assert f"| 128 tokens, 128 -> 144 | {label} |" in " ".join(printed.split())


def test_where_nothing_is_quantized_nothing_is_tested(capsys) -> None:
    assert prove_backend.main(["--precision", "bf16", "--backend", "emulated"]) == 0
    assert "not tested: it quantizes no linear" in capsys.readouterr().out


def test_the_command_line() -> None:
    options = prove_backend.parse(["model=tiny", "parallel.tensor=2", "--precision", "nvfp4", "mxfp4"])
    assert options.overrides == ["model=tiny", "parallel.tensor=2"] and options.precision == ["nvfp4", "mxfp4"]
    assert options.backend == ["all"]


def test_misuse(capsys) -> None:
    assert prove_backend.main(["model.hidden_dims=3"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert prove_backend.main(["model.hidden_dim=100"]) == 2
    assert prove_backend.main(["precision.bf16_blocks.names=['*.no_proj']", "--precision", "nvfp4"]) == 2
    assert "matches no linear" in capsys.readouterr().err
    for wrong in (["--precision", "fp3"], ["--backend", "cutlass"], ["--fast"]):
        with pytest.raises(SystemExit) as ended:
            prove_backend.main(wrong)
        assert ended.value.code == 2


def test_flushed_denormals_are_seen() -> None:
    assert not environment.flushes_denormals()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        assert environment.flushes_denormals()
    finally:
        torch.set_flush_denormal(False)
