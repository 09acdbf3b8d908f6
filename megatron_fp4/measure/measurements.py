"""All that a run measures of its own numerics, in the calls that its loop makes:

    measurements = Measurements(config, model, mesh, controller, records=writer, log=console)
    for step, micro_batches in ...:
        ... measurements.gradient_noise(step, micro_batches) ...    where the precision switch wants to know it
        measurements.replay(step, micro_batches)
        with measurements.of(step):
            result = train_step(...)
        measurements.write(step)

Steps count from 0 here; what is recorded of a step goes by the number of steps done after it, as all of metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from megatron_fp4.config.schema import Config
from megatron_fp4.measure.diagnostics import Diagnostics, diagnostics_scalars
from megatron_fp4.measure.gradient_noise import GradientNoise, gradient_noise
from megatron_fp4.measure.replay import Replay, ReplayError
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.switch import PrecisionController
from megatron_fp4.precision.verify import Recheck, RecheckError
from megatron_fp4.training.accumulate import MicroBatch


class Records(Protocol):
    """Keeps measurements and events (report/metrics.py has one)."""

    def record(self, step: int, kind: str, values: dict[str, Any], scalars: dict[str, float]) -> None:
        """A measurement after `step` steps: JSON values, and those of them that make curves."""

    def event(self, step: int, event: str, **details: Any) -> None:
        """Something that happened after `step` steps."""


class Log(Protocol):
    """Shows events to people (report/console.py has one)."""

    def event(self, step: int, text: str) -> None:
        """Something that happened after `step` steps."""


class Measurements:
    """Diagnostics, gradient noise, rechecks and replays of one run, as its configuration asks for them.

    records, log: where results go; on ranks that write nothing they do nothing.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        mesh: ParallelMesh,
        controller: PrecisionController,
        *,
        records: Records,
        log: Log,
    ) -> None:
        self._config, self._records, self._log = config, records, log
        self._model, self._mesh, self._controller = model, mesh, controller
        self._diagnostics = Diagnostics(config.precision.diagnostics.interval, controller.linears)
        self._recheck = Recheck(config.precision.recheck_interval, controller.linears, mesh.device)
        self._replay = Replay(config.run.replay_interval, model, mesh, controller)

    def before_step(self, step: int) -> bool:
        """Whether micro-batches of `step` are computed before it, to be measured: these want memory of their own."""
        return self._controller.switch.measures(step) or self._replay.due(step)

    def gradient_noise(self, step: int, micro_batches: Sequence[MicroBatch]) -> GradientNoise:
        """Measure and record the quantization noise in the gradient of `step`, which may follow. A collective."""
        reshard = self._config.parallel.reshard
        noise = gradient_noise(self._model, micro_batches, self._mesh, self._controller, step=step, reshard=reshard)
        self._records.record(step + 1, "gradient_noise", noise.as_record(), noise.scalars())
        threshold = self._config.precision.switch.threshold
        self._log.event(step, f"gradient over quantization noise {noise.ratio:.3f}, switch below {threshold:.3f}")
        return noise

    def replay(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Compute a micro-batch of `step`, which follows, twice if that is due. A collective then.

        Raises ReplayError on all ranks if a rank's two computations differ and `run.replay_action` ends the run.
        """
        replayed = self._replay.before_step(step, micro_batches)
        if replayed is None or not replayed.differences:
            return
        self._records.event(step + 1, "replay", **replayed.as_event())
        if self._config.run.replay_action == "end":
            raise ReplayError(f"{replayed}; test that machine, or set run.replay_action=warn to go on all the same")
        self._log.event(step, str(replayed))

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """A context for the training step `step`, in which its linears are measured and rechecked if that is due."""
        with self._diagnostics.measuring(step), self._recheck.watching(step):
            yield

    def write(self, step: int) -> None:
        """Record what was seen in `step`. Collective where anything was due.

        Raises RecheckError on all ranks if a linear was at fault and `precision.recheck_action` ends the run.
        """
        if (rechecked := self._recheck.collect()) is not None and rechecked.faults:
            self._records.event(step + 1, "recheck", linear=rechecked.linear, faults=rechecked.faults)
            if self._config.precision.recheck_action == "end":
                raise RecheckError(f"{rechecked}; set precision.recheck_action=warn to go on all the same")
            self._log.event(step + 1, str(rechecked))
        if (record := self._diagnostics.collect()) is not None:
            self._records.record(step + 1, "diagnostics", record, diagnostics_scalars(record))
