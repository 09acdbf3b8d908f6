"""How far a preparation is: a bar on a terminal, else a line a minute."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from data.prepare.work import State

_LINE_SECONDS = 60.0
_RATE_SECONDS = 10.0


class PrepareProgress:
    """Shows positions, rates and malformed records while a `with` of it is open; call it as a `Progress` of `ingest`.

    Rates are those of the last ten seconds.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._next_line = time.monotonic() + _LINE_SECONDS
        self._seen: deque[tuple[float, int, int]] = deque()  # time, bytes of text, tokens

    def __enter__(self) -> PrepareProgress:
        if self._stream.isatty():
            columns = (BarColumn(bar_width=10), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, text: str) -> None:
        """Print a line of its own, above the bar."""
        self._console.print(text, markup=False)

    def __call__(self, position: int, total: int, state: State) -> None:
        now = time.monotonic()
        text = sum(count.text_bytes for count in state.counts.values())
        tokens = sum(count.tokens for count in state.counts.values())
        self._seen.append((now, text, tokens))
        while len(self._seen) > 2 and self._seen[1][0] < now - _RATE_SECONDS:
            self._seen.popleft()
        if self._bar is None and now < self._next_line:
            return
        records, malformed = f"{state.records:,} records", f"{state.malformed.total():,} malformed"
        if self._bar is None:
            self._next_line = now + _LINE_SECONDS
            share = [f"{position / total:.0%}"] if total else []
            self.line(", ".join([*share, records, f"{tokens:,} tokens", *self._rates(), malformed]))
            return
        words = ", ".join([records, *self._rates(), malformed])  # 80 columns have room for these
        if self._task is None:
            self._task = self._bar.add_task(words, total=total or None, completed=position)
        else:
            self._bar.update(self._task, description=words, completed=position)

    def _rates(self) -> list[str]:
        (start, text, tokens), (end, more_text, more_tokens) = self._seen[0], self._seen[-1]
        if end <= start:
            return []
        seconds = end - start
        return [
            f"{(more_text - text) / seconds / 1e6:.1f} MB/s",
            f"{(more_tokens - tokens) / seconds / 1e6:.2f}M tokens/s",
        ]
