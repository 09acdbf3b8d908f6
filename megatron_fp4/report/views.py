"""TensorBoard and wandb: views of `metrics.jsonl` for looking on, which may fail without harm to the run."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fp4.report.outage import RETRY_SECONDS, Outage

logger = logging.getLogger(__name__)

# How long a start waits for wandb's server, and for an answer where wandb asks for a key on a terminal.
INIT_SECONDS, LOGIN_SECONDS = 60, 20
# How long the end waits for what wandb has not sent yet.
FINISH_SECONDS = 60.0


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


@dataclass(frozen=True)
class WandbSettings:
    """mode: `online` or `offline`. run_id: of an earlier start, None: a new one. config: shown there."""

    mode: str
    project: str
    run_id: str | None
    config: dict[str, Any] | None


class WandbView:
    """Scalars at wandb; without its server, in files that `wandb sync` sends later.

    run_id: of the run there, None if nothing can be logged. offline_because: why a run that asked for `online` is
    offline, with the remedy; None if it is as asked. Raises ValueError without the package.
    """

    def __init__(self, directory: Path, settings: WandbSettings, retry_seconds: float = RETRY_SECONDS) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"logging.wandb={settings.mode} needs the package wandb; "
                'pip install "megatron_fp4[wandb]", or set disabled'
            ) from error
        self.outage = Outage("wandb", "its points of now are missing there", retry_seconds)
        self._wandb = wandb
        self.offline_because: str | None = None
        # wandb's own switch for machines without a network, which an explicit mode would overrule.
        mode = os.environ.get("WANDB_MODE", settings.mode) if settings.mode == "online" else settings.mode
        try:
            self._run = self._start(wandb, directory, settings, mode)
        except Exception as error:
            self._run = None
            if mode == "online":
                self._fall_back(wandb, directory, settings, error)
            else:
                self.outage.failed(error)
        self.run_id: str | None = settings.run_id if self._run is None else self._run.id

    def _fall_back(self, wandb: Any, directory: Path, settings: WandbSettings, error: Exception) -> None:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        try:
            wandb.teardown()  # its service still holds the id of the run that did not start
            self._run = self._start(wandb, directory, settings, "offline")
        except Exception as second:
            self.outage.failed(second)
            return
        # wandb names a run's folder; where the stand-in of a test or another version does not, the pattern does.
        folder = Path(str(getattr(self._run, "dir", ""))).parent
        if not folder.name.startswith("offline-run-"):
            folder = directory / "wandb" / "offline-run-*"
        self.offline_because = f"{reason}; send it later: wandb sync {folder}"
        logger.warning("wandb does not answer, so this run logs offline (%s)", self.offline_because)

    @staticmethod
    def _start(wandb: Any, directory: Path, settings: WandbSettings, mode: str) -> Any:
        return wandb.init(
            project=settings.project,
            name=directory.name,
            dir=str(directory),
            mode=mode,
            id=settings.run_id,
            resume="allow",
            config=settings.config,
            # Its stdout is wrapped by default, which garbles a live progress bar.
            settings=wandb.Settings(console="off", quiet=True, init_timeout=INIT_SECONDS, login_timeout=LOGIN_SECONDS),
        )

    def show(self, values: dict[str, float], step: int) -> None:
        """Add a point to the curve of every name."""
        self._log(lambda: values, step)

    def texts(self, samples: list[dict[str, Any]], step: int) -> None:
        """Add a table of texts behind their prompts."""
        columns = ["prompt", "text", "ended"]
        rows = [[sample[name] for name in columns] for sample in samples]
        self._log(lambda: {"text": self._wandb.Table(columns=list(columns), data=rows)}, step)

    def _log(self, values: Callable[[], dict[str, Any]], step: int) -> None:
        if self._run is None or not self.outage.may_try:
            return
        try:
            self._run.log(values(), step=step)
        except Exception as error:
            self.outage.failed(error)
        else:
            self.outage.worked()

    def close(self) -> None:
        """Send what is left, for at most `FINISH_SECONDS`; what is not sent by then stays in the run's folder."""
        if self._run is None:
            return
        run, self._run, failures = self._run, None, []

        def finish() -> None:
            try:
                run.finish()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=finish, name="wandb finish", daemon=True)
        thread.start()
        thread.join(FINISH_SECONDS)
        if thread.is_alive():
            failures.append(TimeoutError(f"not everything was sent within {FINISH_SECONDS:.0f} s"))
        if failures:
            folder = Path(str(getattr(run, "dir", "wandb"))).parent
            logger.error("wandb: %s; send the rest later: wandb sync %s", failures[0], folder)
