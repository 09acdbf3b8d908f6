"""Profile some steps with torch's profiler, and record the history of CUDA memory.

Only the first rank does so. It writes into run.dir:

    profile_steps_11-13.json.gz   a trace for chrome://tracing or ui.perfetto.dev
    profile_steps_11-13.txt       kernels and operators by time
    memory_snapshot.pickle        for https://docs.pytorch.org/memory_viz; written when training ends or fails, also
                                  after it ran out of memory
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from megatron_fp4.training.trainer import Callback, Step

_MEMORY_EVENTS = 200_000
_TABLE_ROWS = 60


class Profile(Callback):
    """Profiles the steps from `logging.profile_steps[0]` to `[1]`, counted from 1, and records every CUDA allocation of
    the run with its stack. The innermost callback."""

    _profile: torch.profiler.profile | None = None
    _profiled = (0, 0)
    _recording = False

    def start(self, done: int) -> None:
        if self.trainer.mesh.rank == 0 and self.trainer.mesh.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
            self._recording = True

    @contextlib.contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        first, last = self.trainer.config.logging.profile_steps
        if self._profile is None and self.trainer.mesh.rank == 0 and first <= step.done <= last:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self.trainer.mesh.device.type == "cuda" else []
            self._profile, self._profiled = torch.profiler.profile(activities=activities), (step.done, step.done)
            self._profile.start()
        yield
        if self._profile is not None:
            self._profiled = (self._profiled[0], step.done)
            if step.done == last:
                self._write()

    def close(self) -> None:
        """Write the memory history, and the profile if the run ended inside the window."""
        try:
            if self._recording:
                torch.cuda.memory._dump_snapshot(str(Path(self.trainer.config.run.dir) / "memory_snapshot.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
        finally:
            self._write()

    def _write(self) -> None:
        if self._profile is None:
            return
        device, profile = self.trainer.mesh.device, self._profile
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._profile = None
        profile.stop()
        stem = Path(self.trainer.config.run.dir) / "profile_steps_{}-{}".format(*self._profiled)
        profile.export_chrome_trace(f"{stem}.json.gz")
        key = f"self_{device.type}_time_total"
        table = profile.key_averages().table(sort_by=key, row_limit=_TABLE_ROWS, max_name_column_width=80)
        Path(f"{stem}.txt").write_text(table + "\n")
