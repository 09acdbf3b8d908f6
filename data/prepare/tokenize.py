"""One task to tokens: what the processes that tokenize do, a function of the task alone.

Tasks on all cores: processes that encode, each asked by a thread of its own, results in the order of the tasks.

They share nothing with the one that started them but a pipe, so a kill of all of them leaves nothing behind; they
die with it, and it notices when one of them dies.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from data.prepare.readers import Limit, Record, Single, Task, is_held_out
from data.tokenizer import TextTokenizer

REPORTED_RECORDS = 5
SPLITS = ("train", "validation")


@dataclass
class SplitCount:
    """What went into one dataset: documents, tokens (those that mark documents too), bytes of UTF-8 text."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, other: SplitCount) -> None:
        """Add what went into another part of it."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes


@dataclass
class Encoded:
    """The documents of one task: for each split their lengths, int32 [documents], and their tokens one after the other.

    malformed: records skipped by problem; reports: (where, problem) of the first of them. huge: documents above the
    limit.
    """

    lengths: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    counts: dict[str, SplitCount] = field(default_factory=dict)
    malformed: Counter[str] = field(default_factory=Counter)
    reports: list[tuple[str, str]] = field(default_factory=list)
    huge: int = 0


@dataclass(frozen=True)
class Encoder:
    """Turns tasks into tokens of `dtype`: `before` and `after` are the ids that begin and end every document."""

    tokenizer: TextTokenizer
    dtype: np.dtype[Any]
    before: tuple[int, ...]
    after: tuple[int, ...]
    limit: Limit

    def encode(self, task: Task) -> Encoded:
        """The tokens of a task's documents. Raises ValueError for a huge document that is to be refused."""
        done = Encoded()
        texts: dict[str, list[str]] = {split: [] for split in SPLITS}
        for record in records_within(task, self.limit, done):
            if record.problem is not None:
                done.malformed[record.problem] += 1
                if len(done.reports) < REPORTED_RECORDS:
                    done.reports.append((record.where, record.problem))
                continue
            held_out = record.held_out
            if held_out is None:
                held_out = is_held_out(record.text, self.limit.validation)
            texts[SPLITS[held_out]].append(record.text)
        before, after = np.array(self.before, dtype=np.int32), np.array(self.after, dtype=np.int32)
        for split, documents in texts.items():
            if not documents:
                continue
            encoded = self.tokenizer.encode_arrays(documents)
            more = len(before) + len(after)
            lengths = np.array([len(ids) + more for ids in encoded], dtype=np.int32)
            if more == 0 and not lengths.all():
                raise ValueError(
                    "a document has no token at all, as its text normalizes to nothing; end documents with a token"
                )
            parts = [part for ids in encoded for part in (before, ids, after)]
            done.lengths[split] = lengths
            done.tokens[split] = np.concatenate(parts).astype(self.dtype)
            size = sum(len(text.encode("utf-8")) for text in documents)
            done.counts[split] = SplitCount(len(documents), int(lengths.sum(dtype=np.int64)), size)
        return done


def records_within(task: Task, limit: Limit, done: Encoded) -> Iterator[Record]:
    """The records of a task, documents above the limit split or left out; these are counted in `done`."""
    if isinstance(task, Single):
        done.huge += task.huge
        yield from task.records()
        return
    for record in task.records():
        if record.problem is None and limit.exceeded_by(record.text):
            for single in limit.records_of(record):
                done.huge += single.huge
                yield from single.records()
        else:
            yield record


# Enough that no process waits while results are written; a task holds at most a document of the largest size.
_WAITING_TASKS = 3


class WorkerDied(Exception):
    """A process that tokenizes was ended from outside."""


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


@contextmanager
def encoding_processes(encoder: Encoder, number: int) -> Iterator[EncodingProcesses]:
    """So many processes with the encoder; 0: tasks are encoded in this process. They end with the block."""
    context = multiprocessing.get_context("spawn")
    content = pickle.dumps(encoder)
    workers: list[_Worker] = []
    found: EncodingProcesses | None = None
    try:
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, content), daemon=True)
            process.start()
            theirs.close()
            workers.append(_Worker(process, ours))
        found = EncodingProcesses(encoder, workers)
        yield found
    finally:
        if found is not None:
            found.closed = True
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
        if found is not None:
            found.threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.pipe.close()


class EncodingProcesses:
    """Encodes tasks; made by `encoding_processes`."""

    def __init__(self, encoder: Encoder, workers: list[_Worker]) -> None:
        self.closed = False
        self.threads = ThreadPoolExecutor(max(1, len(workers)))
        self._encoder = encoder
        self._number = len(workers)
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in workers:
            self._idle.put(worker)

    def encode(self, tasks: Iterable[Task]) -> Iterator[Encoded]:
        """The result of each task, in their order. Raises what encoding raises, and WorkerDied."""
        if self._number == 0:
            yield from map(self._encoder.encode, tasks)
            return
        waiting: deque[Future[Encoded]] = deque()
        try:
            for task in tasks:
                waiting.append(self.threads.submit(self._ask, task))
                while len(waiting) >= self._number + _WAITING_TASKS or (waiting and waiting[0].done()):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _ask(self, task: Task) -> Encoded:
        worker = self._idle.get()
        try:
            worker.pipe.send(task)
            answer = worker.pipe.recv()
        except (EOFError, OSError) as error:
            if self.closed:
                raise WorkerDied("the processes that tokenize were ended") from error
            worker.process.join(10)
            code = worker.process.exitcode
            how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
            raise WorkerDied(
                f"a process that tokenizes (process {worker.process.pid}) was ended {how}, often because the host had "
                "no memory left (fewer --workers or a smaller --max-document-bytes need less)"
            ) from error
        finally:
            self._idle.put(worker)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _work(pipe: Connection, content: bytes) -> None:
    """The life of a process that tokenizes."""
    # A terminal sends these to all of its processes; the one that started this one ends it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores have processes of their own
    encoder: Encoder = pickle.loads(content)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: Encoded | Exception = encoder.encode(task)
        except ValueError as error:
            answer = error
        except Exception as error:  # it may not pickle, and is ours
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(answer)


def _die_with(sentinel: int) -> None:
    """End this process, whatever it does, as soon as the one that started it is gone."""
    wait([sentinel])
    os._exit(1)
