"""Looking at a run from inside, on request: a profiler window over some steps, and the history of CUDA memory.

Rank 0 alone measures and writes, into run.dir:

    profile_steps_11-13.json.gz   a trace for chrome://tracing or ui.perfetto.dev
    profile_steps_11-13.txt       kernels and operators by time
    memory_snapshot.pickle        for https://docs.pytorch.org/memory_viz; written when training ends or fails, so that
                                  running out of memory leaves it behind
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

_MEMORY_EVENTS = 200_000
_TABLE_ROWS = 60


class ProfileWindow:
    """Profiles the steps from `steps[0]` to `steps[1]`, counted from 1; an empty `steps` or not `active`: none.

    A context: leaving it ends a window that the run's end has cut.
    """

    def __init__(self, run_dir: Path, steps: Sequence[int], device: torch.device, active: bool) -> None:
        self.run_dir, self.device = run_dir, device
        self.first, self.last = (steps[0], steps[1]) if steps and active else (0, 0)
        self._profile: torch.profiler.profile | None = None
        self._profiled: tuple[int, int] = (0, 0)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the step with index `step`, counted from 0."""
        number = step + 1
        if self._profile is None and self.first <= number <= self.last:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
            self._profile, self._profiled = torch.profiler.profile(activities=activities), (number, number)
            self._profile.start()
        yield
        if self._profile is not None:
            self._profiled = (self._profiled[0], number)
            if number == self.last:
                self._write()

    def __enter__(self) -> ProfileWindow:
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            self._write()

    def _write(self) -> None:
        assert self._profile is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        profile, self._profile = self._profile, None
        profile.stop()
        stem = self.run_dir / "profile_steps_{}-{}".format(*self._profiled)
        profile.export_chrome_trace(f"{stem}.json.gz")
        key = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=key, row_limit=_TABLE_ROWS, max_name_column_width=80)
        Path(f"{stem}.txt").write_text(table + "\n")


@contextlib.contextmanager
def memory_history(run_dir: Path, active: bool) -> Iterator[None]:
    """Record every CUDA allocation inside, with its stack; the last ones are written at the end, however it comes."""
    if not active:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(run_dir / "memory_snapshot.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
