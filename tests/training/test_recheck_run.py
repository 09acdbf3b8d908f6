"""What a recheck finds of a fault on one rank, and what that does to a run. (Without a fault it is the same run:
tests/measure/test_diagnostics_run.py.)"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain
from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.recipe import DGRAD_GRADIENT
from megatron_fp4.precision.verify import Recheck
from tests.measure.test_diagnostics_run import LINEARS, NVFP4, Run
from tests.test_pretrain import SMALL
from tests.training.harness import launch, toy_mesh

pytestmark = pytest.mark.slow


def spoil_gradients(run: Run, first: int) -> None:
    """One code of dgrad's gradients is wrong from step `first` on."""

    class Faulty(EmulatedBackend):
        def operands(self, x: Any, columns: Any, rows: Any) -> Any:
            along_columns, along_rows = super().operands(x, columns, rows)
            if run.step_state.step < first or columns is None or columns.slot != DGRAD_GRADIENT:
                return along_columns, along_rows

            def spoiled() -> Any:
                made = along_columns()
                values = made.unpacked().clone()
                values.view(-1)[values.abs().argmax()] *= -1
                return replace(made, values=values)

            return spoiled, along_rows

    for context in run.linears.values():
        context.backend = Faulty()


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


@pytest.fixture
def faulty_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the 121st product on, some way into the second or third step, all products are two percent off."""
    calls = 0
    gemm = EmulatedBackend.gemm

    def spoiled(self: EmulatedBackend, *arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        product = gemm(self, *arguments)
        return product * 1.02 if calls > 120 else product

    monkeypatch.setattr(EmulatedBackend, "gemm", spoiled)


def test_a_fault_ends_the_run_in_one_line_before_its_checkpoint(
    faulty_products: None, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = ["data.num_workers=0", "train.steps=4", "validation.interval=0", "run.device=cpu"]
    places = [f"run.dir={tmp_path}", f"data.cache_dir={corpus}", "logging.tensorboard=false"]
    assert pretrain.main([*SMALL, *fast, *places, "precision.recheck_interval=1"]) == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (event,) = [record for record in records if record.get("event") == "recheck"]
    step = event["step"]
    assert 1 < step < 4
    assert f"pretrain.py: recheck of {event['linear']} in step {step}: rank 0: " in line
    assert " product" in line and "relative error" in line and "precision.recheck_interval=0" in line
    saved = [int(path.name.removeprefix("step_")) for path in (tmp_path / "checkpoints").glob("step_*")]
    assert sorted(saved) == list(range(1, step))
