"""Callbacks about numerics: compare kernels, switch the precision, compute a micro-batch twice, measure quantization.
The work itself is in precision/verify.py, precision/plan.py and measure/."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megatron_fp4.measure.diagnostics import Probe, ResidualStream, diagnostics_record, diagnostics_scalars
from megatron_fp4.measure.gradient_noise import GradientNoise, gradient_noise
from megatron_fp4.measure.replay import replay
from megatron_fp4.precision import verify
from megatron_fp4.precision.verify import Recheck
from megatron_fp4.runtime.errors import WrongNumbersError
from megatron_fp4.training.trainer import Callback, Step


class SelfTest(Callback):
    """Compares a native backend with the reference, on random tensors, before the first step."""

    def start(self, done: int) -> None:
        """Raises SelfTestError if a native kernel's result differs from the reference."""
        trainer, train = self.trainer, self.trainer.config.train
        linears = trainer.precision.linears
        backend = next(iter(linears.values())).backend
        if backend.name != "emulated":
            trainer.progress.at(0, "self-test")
            cases = verify.cases_of(trainer.precision.plans, linears, train.micro_batch_size * train.sequence_length)
            trainer.log.console.text(verify.require(backend, cases, trainer.mesh.device))


class LinearCheck(Callback):
    """Compares one linear with the reference every `precision.recheck_interval` steps, on its own tensors."""

    def start(self, done: int) -> None:
        self._recheck = Recheck(self.trainer.config.precision.recheck_interval, self.trainer.precision.linears)

    def around_step(self, step: Step) -> AbstractContextManager[object]:
        return self._recheck.watching(step.index)

    def after_step(self, step: Step) -> None:
        """Raises WrongNumbersError on all ranks if the linear's result was wrong."""
        if (found := self._recheck.collect()) is None or not found.faults:
            return
        self.trainer.log.metrics.event(step.done, "recheck", linear=found.linear, faults=found.faults)
        remedy = "set precision.backend=emulated, or precision.recheck_interval=0 to continue without this check"
        raise WrongNumbersError(f"{found}; {remedy}")


class Switch(Callback):
    """Switches to the second precision plan, at the configured step or when the gradient noise is too large."""

    name = "switch"

    def before_step(self, step: Step) -> None:
        trainer = self.trainer
        if trainer.precision.before_step(step.index, lambda: self._measure(step).ratio):
            switch = trainer.config.precision.switch
            trainer.log.metrics.event(step.done, "switch", scope=switch.scope, target=switch.target)
            trainer.log.console.event(step.index, f"precision switches to {switch.target} ({switch.scope})")

    def _measure(self, step: Step) -> GradientNoise:
        trainer = self.trainer
        trainer.make_room()
        noise = gradient_noise(trainer.model, step.batch, trainer.mesh, trainer.precision)
        record, threshold = noise.as_record(), trainer.config.precision.switch.threshold
        curves = {f"gradient_noise/{name}": record[name] for name in ("ratio", "gradient_norm", "noise_norm")}
        trainer.log.metrics.record(step.done, "gradient_noise", record, curves)
        text = f"gradient over quantization noise {noise.ratio:.3f}, switch below {threshold:.3f}"
        trainer.log.console.event(step.index, text)
        return noise

    def rolled_back(self, done: int, checkpoint: int, state: Any) -> None:
        self.load_state_dict(state)

    def state_dict(self) -> Any:
        return self.trainer.precision.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Raises ValueError if the checkpoint is after a switch that this run does not have."""
        self.trainer.precision.load_state_dict(state)


class ReplayCheck(Callback):
    """Computes a micro-batch of each rank twice every `run.replay_interval` steps."""

    def before_step(self, step: Step) -> None:
        """Raises WrongNumbersError on all ranks if a rank's two results differ."""
        trainer = self.trainer
        if step.index % trainer.config.run.replay_interval:
            return
        trainer.make_room()
        trainer.progress.at(step.done, "replay")
        replayed = replay(trainer.model, step.batch, trainer.mesh, trainer.precision)
        if culprits := replayed.culprits:
            ranks, differences = [one.rank for one in culprits], [vars(one) for one in replayed.differences[:16]]
            found = {"ranks": ranks, "first": culprits[0].first, "differences": differences}
            trainer.log.metrics.event(step.done, "replay", **found)
            remedy = "test that machine, or set run.replay_interval=0 to continue without this check"
            raise WrongNumbersError(f"{replayed}; {remedy}")


class QuantizationDiagnostics(Callback):
    """Probes the linears and the residual stream in every `precision.diagnostics.interval`-th step. Gradient noise and
    replays run outside the step, and are not probed."""

    _probe: Probe | None = None

    @contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        self._probe = None
        if step.index % self.trainer.config.precision.diagnostics.interval:
            yield
            return
        self._probe, self._residual = Probe(), ResidualStream()
        with self._probe.attached(self.trainer.precision.linears), self._residual.attached(self.trainer.model.blocks):
            yield

    def after_step(self, step: Step) -> None:
        if self._probe is not None and (found := self._probe.collect(list(self.trainer.precision.linears))):
            record = {**diagnostics_record(found), "residual_rms": self._residual.collect()}
            self.trainer.log.metrics.record(step.done, "diagnostics", record, diagnostics_scalars(record))
