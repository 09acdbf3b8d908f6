"""The end of a finished run: its table, summary.json and loss.png."""

from __future__ import annotations

from pathlib import Path

import yaml

from megatron_fp4.checkpoint.files import folder_name
from megatron_fp4.config.compose import compose_config, to_yaml
from megatron_fp4.logging.files import REPORT_FILE, attempt
from megatron_fp4.logging.summary import summarize
from megatron_fp4.training.trainer import Callback, Trainer


class Summary(Callback):
    """Writes it when the records are closed, on the first rank."""

    def conclude(self) -> None:
        """From the records' last validation."""
        trainer = self.trainer
        if trainer.mesh.rank != 0:
            return
        config, data = trainer.config, trainer.data
        steps = config.train.steps
        losses = trainer.log.losses or (trainer.missing.losses if trainer.missing is not None else {})
        export = Path(config.run.dir) / "exports" / folder_name(steps)
        summarize(
            trainer.log.console,
            config,
            trainer.tokens(steps),
            trainer.precision.switch.switched_at,
            losses,
            data.unigram_entropy,
            data.bits_per_byte(losses),
            export if export.is_dir() else None,
        )


def report(trainer: Trainer, configs: Path) -> None:
    """Write report.html of a run that has finished. The other ranks wait for it no more, and it may fail."""
    path = Path(trainer.config.run.dir) / REPORT_FILE

    def write() -> Path:
        from megatron_fp4.logging.page import write_report  # imports matplotlib, for which no start has to wait

        return write_report([trainer.config.run.dir], defaults=yaml.safe_load(to_yaml(compose_config([], configs))))

    if attempt(str(path), write) is not None:
        trainer.log.console.text(f"all of it on one page: {path}")
