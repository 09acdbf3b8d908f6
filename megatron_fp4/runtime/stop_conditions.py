"""What may end or save a run besides signals: `run.max_minutes`, and the files `STOP` and `SAVE` in run.dir.

`touch run.dir/STOP` stops after a step with a checkpoint, `touch run.dir/SAVE` saves one and trains on; each is removed
when it was obeyed. Only the first rank looks, at most once a second; the step's all-reduce tells the others.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.runtime.signals import StopRequest

log = logging.getLogger(__name__)

STOP_FILE, SAVE_FILE = "STOP", "SAVE"
LOOK_EVERY = 1.0


class StopConditions:
    """What this rank was told to do: by signals, and on the first rank (`active`) by files and by the clock.

    max_minutes: of the process, 0 for no limit. A STOP file that is there already was meant for the run before: it is
    removed.
    """

    def __init__(self, run_dir: Path, max_minutes: float, signals: StopRequest, active: bool) -> None:
        self._run_dir = run_dir
        self._max_minutes = max_minutes
        self._signals = signals
        self._active = active
        self._looked = -LOOK_EVERY
        self._files: set[str] = set()
        if active and (run_dir / STOP_FILE).exists():
            self._remove(STOP_FILE)
            log.warning("%s was there at the start, meant for the run before: removed", run_dir / STOP_FILE)

    @property
    def stop(self) -> bool:
        """Whether to stop after this step."""
        return self.why_stop is not None

    @property
    def save(self) -> bool:
        """Whether to save a checkpoint after this step."""
        self._look()
        return SAVE_FILE in self._files

    @property
    def why_stop(self) -> str | None:
        """What asked this rank to stop: a signal's name, a file, a setting; None if nothing did."""
        if self._signals.received is not None:
            return self._signals.received.name
        if self._active and 0 < self._max_minutes <= (time.monotonic() - self._signals.began) / 60:
            return f"run.max_minutes={self._max_minutes:g}"
        self._look()
        return f"the file {STOP_FILE}" if STOP_FILE in self._files else None

    def agreed(self, mesh: ParallelMesh) -> bool:
        """Whether any rank was told to stop. A collective: for places without a training step, as before the first."""
        flag = torch.tensor(float(self.stop), device=mesh.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def obeyed(self) -> None:
        """A checkpoint was saved after the step that carried what this rank was told: remove the files that said so."""
        for name in self._files:
            self._remove(name)
        self._files.discard(SAVE_FILE)  # the request to stop stays in force

    def _look(self) -> None:
        if self._active and time.monotonic() - self._looked >= LOOK_EVERY:
            self._files |= {name for name in (STOP_FILE, SAVE_FILE) if (self._run_dir / name).exists()}
            self._looked = time.monotonic()

    def _remove(self, name: str) -> None:
        try:
            (self._run_dir / name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("could not remove %s: %s", self._run_dir / name, error)
