"""Tasks to tokens on all cores: a task's result is a function of the task alone, and results come in their order."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from data.prepare.readers import EMPTY, Task
from data.tokenizer import TextTokenizer

REPORTED_RECORDS = 5
SPLITS = ("train", "validation")
# Enough that no process waits while results are written.
_WAITING_TASKS = 3
Place = TypeVar("Place")


class WorkerDied(Exception):
    """A process that tokenizes was ended from outside."""


@dataclass(frozen=True)
class Options:
    """What shapes the output besides the inputs and the tokenizer. Raises ValueError for a number that means nothing.

    validation: share of documents held out by `is_held_out`, 0 for none. max_malformed: largest share of records that
    may be skipped; a preparation may resume with another one. max_document_bytes: of UTF-8; what is larger becomes
    several documents, all on the side of an unsplit copy. bos_token: begins every document, None for none.
    """

    validation: float = 0.01
    max_malformed: float = 0.01
    max_document_bytes: int = 16 << 20
    bos_token: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"--validation {self.validation} must be at least 0 and below 1")
        if not 0 <= self.max_malformed <= 1:
            raise ValueError(f"--max-malformed {self.max_malformed} must be from 0 to 1")
        # A document has at most a token for each byte and a few more, and the index counts them in an int32.
        if not 64 <= self.max_document_bytes <= 1 << 30:
            raise ValueError(f"--max-document-bytes {self.max_document_bytes} must be from 64 to {1 << 30}")


@dataclass
class SplitCount:
    """What went into one dataset: documents, tokens (those that mark documents too), bytes of UTF-8 text."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, other: SplitCount) -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes


@dataclass
class Encoded:
    """The documents of one task: for each split their lengths, int32 [documents], and their tokens one after the other.

    malformed: records skipped by problem; reports: (where, problem) of the first of them. empty: records without text.
    huge: documents above the largest size.
    """

    lengths: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    counts: dict[str, SplitCount] = field(default_factory=dict)
    malformed: Counter[str] = field(default_factory=Counter)
    reports: list[tuple[str, str]] = field(default_factory=list)
    empty: int = 0
    huge: int = 0


def encode(tokenizer: TextTokenizer, dtype: np.dtype[Any], options: Options, task: Task) -> Encoded:
    """A task's documents as tokens of `dtype`, between the options' bos_token and the tokenizer's eod_token."""
    done = Encoded()
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for record in task():
        if record.problem == EMPTY:
            done.empty += 1
        elif record.problem is not None:
            done.malformed[record.problem] += 1
            if len(done.reports) < REPORTED_RECORDS:
                done.reports.append((record.where, record.problem))
        else:
            pieces = pieces_of(record.text, options.max_document_bytes)
            done.huge += pieces != [record.text]
            texts[SPLITS[is_held_out(record.text, options.validation)]] += pieces
    bos = options.bos_token
    before, after = [] if bos is None else [tokenizer.id_of(bos)], [tokenizer.eod_id]
    for split, documents in texts.items():
        if not documents:
            continue
        encoded = [before + ids + after for ids in tokenizer.encode_batch(documents)]
        done.lengths[split] = lengths = np.array([len(ids) for ids in encoded], dtype=np.int32)
        done.tokens[split] = np.fromiter(chain.from_iterable(encoded), dtype)
        size = sum(len(text.encode("utf-8")) for text in documents)
        done.counts[split] = SplitCount(len(documents), int(lengths.sum(dtype=np.int64)), size)
    return done


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is for validation: about `share` of all are; equal documents are on the same side."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big") / 2**64 < share


def pieces_of(text: str, limit: int) -> list[str]:
    """A text as documents of at most `limit` bytes: itself, or pieces cut before white space, where `limit` bytes have
    none at a character; blank ones are left out."""
    if 4 * len(text) <= limit or len(data := text.encode("utf-8")) <= limit:
        return [text]
    pieces: list[str] = []
    start = 0
    while start < len(data):
        cut = len(data)
        if cut > start + limit:
            cut = max(data.rfind(blank, start + 1, start + limit + 1) for blank in (b" ", b"\n", b"\t", b"\r"))
            if cut < 0:
                cut = start + limit
                while cut > start + 1 and data[cut] & 0xC0 == 0x80:  # not the first byte of a character
                    cut -= 1
        piece, start = data[start:cut].decode("utf-8"), cut
        if piece.strip():
            pieces.append(piece)
    return pieces


def encoded_by_processes(
    encoder: Callable[[Task], Encoded], tasks: Iterable[tuple[Place, Task]], number: int
) -> Iterator[tuple[Place, Encoded]]:
    """The result of each task, in their order, by so many processes, 0: in this one; each after what came with it.

    Raises what encoding raises, and WorkerDied. The processes end with the iterator, and with this process.
    """
    if number == 0:
        for place, task in tasks:
            yield place, encoder(task)
        return
    context = multiprocessing.get_context("spawn")
    waiting: deque[tuple[Place, Future[Encoded]]] = deque()
    with (
        tempfile.NamedTemporaryFile() as file,
        ProcessPoolExecutor(number, context, _start, (file.name,)) as pool,
    ):
        # As an argument the encoder would not fit into the pipe of a new process: each start would wait until the
        # process has imported everything.
        pickle.dump(encoder, file)
        file.flush()
        try:
            for place, task in tasks:
                waiting.append((place, pool.submit(_encode, task)))
                while len(waiting) >= number + _WAITING_TASKS or (waiting and waiting[0][1].done()):
                    place, encoded = waiting.popleft()
                    yield place, encoded.result()
            for place, encoded in waiting:
                yield place, encoded.result()
        except BrokenProcessPool as error:
            raise WorkerDied(
                "a process that tokenizes was ended, often because the host had no memory left (fewer --workers or a "
                "smaller --max-document-bytes need less)"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


_encoder: Callable[[Task], Encoded]


def _start(encoder_file: str) -> None:
    """What a process that tokenizes begins with."""
    global _encoder
    # A terminal sends these to all of its processes; the one that started this one ends it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores have processes of their own
    _encoder = pickle.loads(Path(encoder_file).read_bytes())


def _encode(task: Task) -> Encoded:
    return _encoder(task)


def _die_with(sentinel: int) -> None:
    """End this process, whatever it does, as soon as the one that started it is gone."""
    wait([sentinel])
    os._exit(1)
