"""What a run's loop asks to be measured, and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.config.compose import compose_config
from megatron_fp4.measure.measurements import Measurements
from megatron_fp4.precision.verify import RecheckError
from tests.measure.test_diagnostics_run import LINEARS, NVFP4, Run
from tests.training.harness import alone
from tests.training.test_recheck_run import Faulty

CONFIGS = Path(__file__).parents[2] / "configs"


class Everything:
    """Keeps records and both kinds of events, in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def record(self, step: int, kind: str, values: dict[str, Any], scalars: dict[str, float]) -> None:
        self.seen.append((step, kind, values, scalars))

    def event(self, step: int, event: str, **details: Any) -> None:
        self.seen.append((step, event, details))


def measured(run: Run, *overrides: str) -> tuple[Measurements, Everything]:
    config = compose_config(["precision=nvfp4", *overrides], CONFIGS)
    kept = Everything()
    return Measurements(config, run.model, run.mesh, run.controller, records=kept, log=kept), kept


def train(run: Run, measurements: Measurements, num_steps: int) -> list[tuple[float, float]]:
    losses = []
    for step in range(num_steps):
        with measurements.of(step):
            losses.append(run.step(step))
        measurements.write(step)
    return losses


def test_nothing_is_measured_by_default() -> None:
    with alone() as mesh:
        measurements, kept = measured(run := Run(mesh, NVFP4))
        train(run, measurements, 2)
        assert kept.seen == []


def test_a_measured_run_is_the_same_run_and_is_recorded_by_steps_done() -> None:
    with alone() as mesh:
        plain = Run(mesh, NVFP4)
        losses = train(plain, measured(plain)[0], 3)
        run = Run(mesh, NVFP4)
        measurements, kept = measured(run, "precision.diagnostics.interval=2", "precision.recheck_interval=1")
        assert train(run, measurements, 3) == losses
        assert [(step, kind) for step, kind, *_ in kept.seen] == [(1, "diagnostics"), (3, "diagnostics")]
        assert list(kept.seen[0][2]["linears"]) == LINEARS
        assert kept.seen[0][3]["quantization_gradient_to_noise/blocks_worst"] > 0


def test_gradient_noise_is_recorded_and_told() -> None:
    with alone() as mesh:
        run = Run(mesh, NVFP4)
        measurements, kept = measured(run, "precision.switch.threshold=2.5")
        noise = measurements.gradient_noise(4, run.batches(4))
        assert noise == run.noise(4)
        assert kept.seen == [
            (5, "gradient_noise", noise.as_record(), noise.scalars()),
            (4, f"gradient over quantization noise {noise.ratio:.3f}, switch below 2.500", {}),
        ]


@pytest.mark.parametrize("action", ["warn", "end"])
def test_a_fault_is_an_event_before_the_step_is_recorded(action: str) -> None:
    with alone() as mesh:
        run = Run(mesh, NVFP4)
        for context in run.linears.values():
            context.backend = Faulty(run, step=1)
        wanted = ("diagnostics.interval=1", "recheck_interval=1", f"recheck_action={action}")
        measurements, kept = measured(run, *(f"precision.{setting}" for setting in wanted))
        if action == "end":
            with pytest.raises(RecheckError, match=r"in step 2: rank 0: .* precision.recheck_action=warn to go on"):
                train(run, measurements, 2)
        else:
            train(run, measurements, 2)
        event, *rest = kept.seen[1:]
        assert event[:2] == (2, "recheck") and event[2]["linear"] == LINEARS[1]
        assert "rank 0: dgrad_gradient" in event[2]["faults"][0]
        if action == "warn":
            assert rest[0][1].startswith(f"recheck of {LINEARS[1]} in step 2: rank 0: ")
            assert rest[1][:2] == (2, "diagnostics")
