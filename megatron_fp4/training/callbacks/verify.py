"""Native kernels are compared with the reference: on random tensors before the first step, on the run's own later."""

from __future__ import annotations

from contextlib import AbstractContextManager

from megatron_fp4.precision import verify
from megatron_fp4.precision.verify import Recheck, RecheckError
from megatron_fp4.training.trainer import Callback, Step


class Verify(Callback):
    """The self-test at the start, and the recheck of one linear every `precision.recheck_interval` steps."""

    def start(self, done: int) -> None:
        """Raises SelfTestError if a native kernel computes something else than the reference."""
        trainer = self.trainer
        train, linears, precision = trainer.config.train, trainer.precision.linears, trainer.config.precision
        backend = next(iter(linears.values())).backend
        if backend.name != "emulated":
            cases = verify.cases_of(trainer.precision.plans, linears, train.micro_batch_size * train.sequence_length)
            trainer.log.console.text(verify.require(backend, cases, trainer.mesh.device))
        self._recheck = Recheck(precision.recheck_interval, linears)

    def around_step(self, step: Step) -> AbstractContextManager[object]:
        """One linear is watched if one is due."""
        return self._recheck.watching(step.index)

    def after_step(self, step: Step) -> None:
        """Raises RecheckError on all ranks if it was at fault."""
        if (found := self._recheck.collect()) is None or not found.faults:
            return
        self.trainer.log.metrics.event(step.done, "recheck", linear=found.linear, faults=found.faults)
        raise RecheckError(f"{found}; set precision.backend=emulated, or precision.recheck_interval=0 to train on")
