"""Rechecks with a fault on one rank: all ranks learn of it, and the run ends. That they do not change a run without
faults is in tests/measure/test_diagnostics_run.py."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import pretrain
from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.verify import Recheck
from tests.measure.test_diagnostics_run import LINEARS, NVFP4, Run
from tests.precision.test_verify import Spoiled, one_changed
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL, records
from tests.training.harness import launch, toy_mesh

pytestmark = pytest.mark.slow


def spoil_gradients(run: Run, first: int) -> None:
    """Make one value of dgrad's gradient operand wrong from step `first` on."""

    def late(values: Tensor) -> Tensor:
        return values if run.step_state.step < first else one_changed(values)

    for context in run.linears.values():
        context.backend = Spoiled(values=late, operand="dgrad_gradient")


def _spoiled_on_one_rank(rank: int) -> Any:
    run = Run(toy_mesh(), NVFP4)
    if rank == 1:
        spoil_gradients(run, first=2)
    recheck, found = Recheck(2, run.linears), []
    for step in range(5):
        with recheck.watching(step):
            run.step(step)
        found.append(recheck.collect())
    return found


def test_a_fault_on_one_rank_is_known_to_all() -> None:
    for found in launch(_spoiled_on_one_rank, 2):
        assert found[1] is found[3] is None
        assert found[0].faults == []
        for rechecked in (found[2], found[4]):
            assert rechecked.linear == LINEARS[rechecked.step // 2]
            (fault,) = rechecked.faults
            assert fault.startswith("rank 1: dgrad_gradient: values differ in 1 of ")


def test_a_fault_ends_the_run_in_one_line_before_its_checkpoint(monkeypatch, tmp_path: Path, capsys) -> None:
    """From the 121st product on, in the second step, all products are two percent too large."""
    calls, gemm = itertools.count(1), EmulatedBackend.gemm

    def spoiled(*given: Any) -> Any:
        product = gemm(*given)
        return product * 1.02 if next(calls) > 120 else product

    monkeypatch.setattr(EmulatedBackend, "gemm", spoiled)
    settings = [*SMALL, *FAST, *small_corpus(tmp_path), "train.steps=4", "precision.recheck_interval=1"]
    assert pretrain.main([*settings, f"run.dir={tmp_path}/run"]) == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    (event,) = records(tmp_path / "run", "recheck")
    step = event["step"]
    assert 1 < step < 4
    assert f"pretrain.py: recheck of {event['linear']} in step {step}: rank 0: " in line
    assert " product" in line and "relative error" in line and "precision.recheck_interval=0" in line
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    assert sorted(saved) == [f"step_{done:08d}" for done in range(1, step)]
