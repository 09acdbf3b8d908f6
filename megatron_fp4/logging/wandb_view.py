"""wandb: a view of `metrics.jsonl` for looking on, which neither stops nor delays the run.

A thread of its own starts wandb and gives it what the run queues, so that a service that refuses, hangs or dies costs
the run nothing. What could not be given waits and is given once wandb is there again: its service is started anew, with
the same id, without its server in files that `wandb sync` sends later. Only the end of the run waits, for a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import string
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fp4.logging.outage import RETRY_SECONDS, Outage
from megatron_fp4.logging.run_files import attempt, replace_text
from megatron_fp4.logging.words import counted

logger = logging.getLogger(__name__)

ID_FILE = "wandb_run_id"
_ID_LETTERS = string.ascii_lowercase + string.digits
# How long wandb may take to reach its server, before it is offline.
INIT_SECONDS = 60
# How long the end waits for what wandb has not taken or sent yet; and where the run was told to stop, or failed.
FINISH_SECONDS, HURRY_SECONDS = 30.0, 5.0
# Steps that are kept for a wandb that is away: a day of steps of two seconds, in about 100 MB.
_MOST_WAITING = 50_000


@dataclass(frozen=True)
class WandbSettings:
    """mode: `online` or `offline`. run_id: of an earlier start, None: a new one. config: shown there."""

    mode: str
    project: str
    run_id: str | None
    config: dict[str, Any] | None


class WandbView:
    """Curves and texts at wandb.

    run_id: of the run there, the same for all its starts; also written to `directory`/wandb_run_id.
    Raises ValueError without the package.
    """

    def __init__(self, directory: Path, settings: WandbSettings, retry_seconds: float = RETRY_SECONDS) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"logging.wandb={settings.mode} needs the package wandb; "
                'pip install "megatron_fp4[wandb]", or set disabled'
            ) from error
        self._wandb: Any = wandb
        self._directory, self._settings, self._retry_seconds = directory, settings, retry_seconds
        self.outage = Outage("wandb", f"up to {_MOST_WAITING:,} steps wait for it", retry_seconds)
        self.run_id = settings.run_id or "".join(secrets.choice(_ID_LETTERS) for _ in range(8))
        attempt(str(directory / ID_FILE), lambda: replace_text(directory / ID_FILE, self.run_id + "\n"))
        # wandb's own switch for machines without a network, which an explicit mode would overrule.
        self._mode = os.environ.get("WANDB_MODE", settings.mode) if settings.mode == "online" else settings.mode
        self._run: Any = None
        self._waiting: deque[tuple[int, Callable[[], dict[str, Any]]]] = deque()
        self._dropped = 0
        self._news: deque[str] = deque()
        self._changed = threading.Condition()
        self._closing = self._finished = False
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def news(self) -> list[str]:
        """Why a run that asked for `online` logs offline, with the remedy; only what is new since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def show(self, values: dict[str, float], step: int) -> None:
        """Add a point to the curve of every name."""
        self._queue(step, lambda: values)

    def texts(self, samples: list[dict[str, Any]], step: int) -> None:
        """Add a table of texts behind their prompts."""
        columns = ["prompt", "text", "ended"]
        rows = [[sample[name] for name in columns] for sample in samples]
        self._queue(step, lambda: {"text/samples": self._wandb.Table(columns=list(columns), data=rows)})

    def close(self, hurry: bool = False) -> None:
        """Let wandb take and send what is left, for at most `FINISH_SECONDS`, and say what was not.

        hurry: for at most `HURRY_SECONDS`: whoever stopped the run may soon kill it.
        """
        patience = HURRY_SECONDS if hurry else FINISH_SECONDS
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(patience)
        left = len(self._waiting) + self._dropped
        if self._finished and not left:
            return
        what = f"{counted(left, 'point')} not taken" if left else "not everything was sent"
        folder = self._folder()
        send = f"; send what it has later: wandb sync {folder}" if folder else ""
        logger.error("wandb: %s within %.0f s; metrics.jsonl has it all%s", what, patience, send)

    def _queue(self, step: int, values: Callable[[], dict[str, Any]]) -> None:
        with self._changed:
            self._waiting.append((step, values))
            while len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
                self._dropped += 1
            self._changed.notify()

    def _work(self) -> None:
        """The thread: give what waits, in order, until the end; begin again with a wandb that fails."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                step, values = self._waiting[0]
            try:
                if self._run is None:
                    self._run = self._start()
                self._run.log(values(), step=step)
            except Exception as error:
                self._leave()
                self.outage.failed(error)
                with self._changed:
                    if self._closing:
                        return
                    self._changed.wait_for(lambda: self._closing, self._retry_seconds)
            else:
                self.outage.worked("all that waited is on its way")
                with self._changed:
                    # What was the first is so still, unless there was no room for it.
                    if self._waiting and self._waiting[0][1] is values:
                        self._waiting.popleft()
        try:
            if self._run is not None:
                self._run.finish()
            self._finished = True
        except Exception as error:
            logger.error("wandb: %s: %s", type(error).__name__, error)

    def _start(self) -> Any:
        """A run at wandb; offline if it asked for `online` and that fails."""
        try:
            if self._mode == "online":
                _check_key(self._wandb)
            return self._init(self._mode)
        except Exception as error:
            if self._mode != "online":
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self._leave()  # its service still holds the id of the run that did not start
        self._run = self._init("offline")
        # wandb names a run's folder; where the stand-in of a test or another version does not, the pattern does.
        folder = self._folder() or self._directory / "wandb" / "offline-run-*"
        why = f"{reason}; send it later: wandb sync {folder}"
        logger.warning("wandb does not answer, so this run logs offline (%s)", why)
        self._news.append(why)
        return self._run

    def _init(self, mode: str) -> Any:
        wandb, settings = self._wandb, self._settings
        return wandb.init(
            project=settings.project,
            name=self._directory.resolve().name,
            dir=str(self._directory),
            mode=mode,
            id=self.run_id,
            resume="allow",
            config=settings.config,
            # Its stdout is wrapped by default, which garbles a live progress bar.
            settings=wandb.Settings(console="off", quiet=True, init_timeout=INIT_SECONDS),
        )

    def _leave(self) -> None:
        """Give up a run that failed, and its service."""
        self._run = None
        with contextlib.suppress(Exception):
            self._wandb.teardown()

    def _folder(self) -> Path | None:
        files = getattr(self._run, "dir", None)
        return None if files is None else Path(str(files)).parent


def known_run_id(directory: Path, of_checkpoint: str | None) -> str | None:
    """The id at wandb of the run in `directory` that goes on: what an earlier start wrote there, or what its checkpoint
    holds; None if it has none yet."""
    with contextlib.suppress(OSError):
        if written := (directory / ID_FILE).read_text().strip():
            return written
    return of_checkpoint


def _check_key(wandb: Any) -> None:
    """Raise PermissionError without a key, for which `init` would ask on the terminal."""
    try:
        known = wandb.login(prompt=False)
    except TypeError:  # before wandb 0.22
        known = wandb.api.api_key is not None
    if not known:
        raise PermissionError("there is no API key; give it with `wandb login` or WANDB_API_KEY")
