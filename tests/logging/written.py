"""Writes records of invented steps."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from megatron_fp4.config.schema import Config, LoggingConfig, RunConfig
from megatron_fp4.logging.metrics import MetricsWriter, StepMetrics


def metrics(step: int, loss: float = 3.0, skipped: bool = False) -> StepMetrics:
    return StepMetrics(
        step=step,
        tokens=step * 4096,
        loss=loss,
        lr=1e-3,
        grad_norm=1.5,
        tokens_per_second=40e3,
        model_tflops=0.02,
        step_time=0.1,
        skipped=skipped,
        phase="broad",
        plan="nvfp4",
        data_wait=0.01,
    )


@contextmanager
def writing(run_dir: Path, start: int = 0, active: bool = True, **settings: Any) -> Iterator[MetricsWriter]:
    """A writer of a run with these `logging` settings; TensorBoard is off by default."""
    logging = LoggingConfig(**{"tensorboard": False, **settings})
    with closing(MetricsWriter(Config(run=RunConfig(dir=str(run_dir)), logging=logging), start, active)) as writer:
        yield writer


def write(run_dir: Path, start: int, end: int, **settings: Any) -> None:
    """Write records of the steps from `start` + 1 to `end`."""
    with writing(run_dir, start, **settings) as writer:
        writer.record(start, "run", {"total_steps": 10})
        for step in range(start + 1, end + 1):
            writer.step(metrics(step, loss=10.0 - step))
