"""Each step's line in metrics.jsonl and on the console."""

from __future__ import annotations

import time
from typing import Any

from megatron_fp4.logging.metrics import StepMetrics
from megatron_fp4.measure.machine import peak_memory, peak_tflops
from megatron_fp4.training.trainer import Callback, Step


class Records(Callback):
    """Writes what a step did, how fast it was and where it is in the data."""

    name = "wandb_run_id"

    def after_step(self, step: Step) -> None:
        """After measurements, so that their time is the step's."""
        trainer = self.trainer
        log, config, device = trainer.log, trainer.config, trainer.mesh.device
        seconds = time.perf_counter() - step.began
        rate = (trainer.tokens(step.done) - trainer.tokens(step.index)) / seconds
        length = trainer.data.phases.span(step.index).sequence_length or config.train.sequence_length
        flops = trainer.models.training_flops_per_token(config.model, length)
        tflops, peak = flops * rate / trainer.mesh.world_size / 1e12, peak_tflops(device)
        now_and_then = log.active and step.done % config.logging.interval == 0
        first = log.active and step.index == log.console.start_step
        log.step(
            StepMetrics(
                step=step.done,
                tokens=trainer.tokens(step.done),
                loss=step.result.loss,
                lr=trainer.lr(step.index),
                grad_norm=step.result.grad_norm,
                tokens_per_second=rate,
                model_tflops=tflops,
                step_time=seconds,
                skipped=step.result.skipped,
                phase=trainer.phase(step.index),
                plan=trainer.plan_name,
                data_wait=trainer.data.loader.data_wait,
                epochs=trainer.data.epochs(step.done) if now_and_then else {},
                mfu=None if peak is None else tflops / peak,
                peak_memory_gib=peak_memory(device) if now_and_then or first else None,
            )
        )

    def state_dict(self) -> Any:
        """The run's id at wandb."""
        return self.trainer.log.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """That of a checkpoint."""
        self.trainer.log.load_state_dict(state)
