"""TensorBoard: a view of `metrics.jsonl` for looking on, which may fail without harm to the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_fp4.logging.outage import RETRY_SECONDS, Outage


class TensorBoardView:
    """Scalars and events under `directory`; after a failure a new file is begun there.

    resume_step: points of later steps are hidden, as they are cut from metrics.jsonl. Raises ValueError without the
    package.
    """

    def __init__(self, directory: Path, resume_step: int, retry_seconds: float = RETRY_SECONDS) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "logging.tensorboard=true needs the package tensorboard; pip install tensorboard, or set it to false"
            ) from error
        self.outage = Outage(f"TensorBoard ({directory})", "its points of now are missing there", retry_seconds)
        self._writer: Any = None
        self._purge_step = resume_step + 1 if resume_step else None

        def make() -> Any:
            writer = SummaryWriter(str(directory), purge_step=self._purge_step, flush_secs=10)
            self._purge_step = None  # a file that is begun later hides nothing
            return writer

        self._make = make
        self._try(lambda writer: None)

    def show(self, values: dict[str, float], step: int) -> None:
        """Add a point to the curve of every name."""

        def add(writer: Any) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self._try(add)

    def event(self, text: str, step: int) -> None:
        """Add a line to the events."""
        self._try(lambda writer: writer.add_text("events", text, step))

    def texts(self, samples: list[dict[str, Any]], step: int) -> None:
        """Add texts behind their prompts, each under a name of its own."""

        def add(writer: Any) -> None:
            for number, sample in enumerate(samples, start=1):
                whole = f"{sample['prompt']}|{sample['text']}"
                # Markdown shows indented lines as they are.
                writer.add_text(f"text/{number}", "\n".join(f"    {line}" for line in whole.split("\n")), step)

        self._try(add)

    def close(self) -> None:
        """Write what is left and close."""
        if self._writer is not None:
            self._try(lambda writer: writer.close())
        self._writer = None

    def _try(self, action: Callable[[Any], None]) -> None:
        if not self.outage.may_try:
            return
        try:
            if self._writer is None:
                self._writer = self._make()
            action(self._writer)
        except Exception as error:
            with contextlib.suppress(Exception):
                self._writer.close()
            self._writer = None
            self.outage.failed(error)
        else:
            self.outage.worked()
