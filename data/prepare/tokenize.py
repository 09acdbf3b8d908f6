"""Tokenizes tasks in several processes. The result of a task depends on nothing else, and results keep their order."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from data.prepare.readers import EMPTY, Task
from data.tokenizer import TextTokenizer

REPORTED_RECORDS = 5
SPLITS = ("train", "validation")
UNENCODABLE = "not encodable by the tokenizer"
# Tasks in the queue beyond one per process, so that no process waits while results are written.
_QUEUED_TASKS = 3
Place = TypeVar("Place")


class WorkerDied(Exception):
    """A process that tokenizes was killed."""


@dataclass(frozen=True)
class Options:
    """What determines the output besides the inputs and the tokenizer. Raises ValueError for a number out of range.

    validation: the share of documents to hold out. max_malformed: the largest share of records that may be skipped; a
    preparation may resume with another value. max_document_bytes: of UTF-8; a larger one becomes several.
    """

    validation: float = 0.01
    max_malformed: float = 0.01
    max_document_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"--validation {self.validation} must be at least 0 and below 1")
        if not 0 <= self.max_malformed <= 1:
            raise ValueError(f"--max-malformed {self.max_malformed} must be from 0 to 1")
        # A document has at most a few tokens more than bytes, and the index has its length as an int32.
        if not 64 <= self.max_document_bytes <= 1 << 30:
            raise ValueError(f"--max-document-bytes {self.max_document_bytes} must be from 64 to {1 << 30}")


@dataclass
class SplitCount:
    """What was written to one dataset: documents, tokens (with those around documents), bytes of text."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, other: SplitCount) -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes


@dataclass
class Encoded:
    """The documents of one task. By split: lengths int32 [documents], tokens (concatenated) and counts.

    malformed: how many records were skipped for each problem. reports: (place, problem) of the first ones. empty:
    records without text. huge: documents that were split because of their size.
    """

    lengths: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    counts: dict[str, SplitCount] = field(default_factory=dict)
    malformed: Counter[str] = field(default_factory=Counter)
    reports: list[tuple[str, str]] = field(default_factory=list)
    empty: int = 0
    huge: int = 0


def encode(tokenizer: TextTokenizer, dtype: np.dtype[Any], options: Options, task: Task) -> Encoded:
    """The documents of a task as tokens of `dtype`. Each begins with the tokenizer's bos_token, if there is one, and
    ends with its eod_token."""
    done = Encoded()

    def skip(where: str, problem: str, why: str = "") -> None:
        done.malformed[problem] += 1
        if len(done.reports) < REPORTED_RECORDS:
            done.reports.append((where, problem + why))

    records: dict[str, list[tuple[str, list[str]]]] = {split: [] for split in SPLITS}
    for record in task():
        if record.problem == EMPTY:
            done.empty += 1
        elif record.problem is not None:
            skip(record.where, record.problem)
        else:
            pieces = pieces_of(record.text, options.max_document_bytes)
            done.huge += pieces != [record.text]
            records[SPLITS[is_held_out(record.text, options.validation)]].append((record.where, pieces))
    for split, kept in records.items():
        texts, ids = [], []
        for where, documents, encoded in _encoded(tokenizer, kept):
            if isinstance(encoded, str):
                skip(where, UNENCODABLE, f" ({encoded})")
            else:
                texts += documents
                ids += [[*tokenizer.ids_before, *document, tokenizer.eod_id] for document in encoded]
        if not texts:
            continue
        done.lengths[split] = lengths = np.array([len(document) for document in ids], dtype=np.int32)
        done.tokens[split] = np.fromiter(chain.from_iterable(ids), dtype)
        size = sum(len(text.encode("utf-8")) for text in texts)
        done.counts[split] = SplitCount(len(texts), int(lengths.sum(dtype=np.int64)), size)
    return done


def _encoded(
    tokenizer: TextTokenizer, records: Sequence[tuple[str, list[str]]]
) -> Iterator[tuple[str, list[str], list[list[int]] | str]]:
    """(place, documents, ids of each document or what the tokenizer raised) of each record, given without ids."""
    try:
        ids = iter(tokenizer.encode_batch([document for _, documents in records for document in documents]))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # any type: tokenizers are libraries in Rust and C++, whose panics are no Exception
        if len(records) > 1:
            for record in records:
                yield from _encoded(tokenizer, [record])
        else:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            yield (*records[0], reason)
    else:
        for where, documents in records:
            yield where, documents, list(islice(ids, len(documents)))


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is for validation, by a hash of its text: about `share` of all are, and equal ones alike."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big") / 2**64 < share


def pieces_of(text: str, limit: int) -> list[str]:
    """A text as documents of at most `limit` bytes of UTF-8. A longer text is cut before white space, or between two
    characters if `limit` bytes have no white space. Blank pieces are left out."""
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


def encode_in_processes(
    encoder: Callable[[Task], Encoded], tasks: Iterable[tuple[Place, Task]], number: int
) -> Iterator[tuple[Place, Encoded]]:
    """(place, result) of each (place, task), in order, computed by `number` processes; 0: in this process.

    Raises what `encoder` raises, and WorkerDied. The processes end when the iterator or this process ends.
    """
    if number == 0:
        for place, task in tasks:
            yield place, encoder(task)
        return
    context = multiprocessing.get_context("spawn")
    waiting: deque[tuple[Place, Future[Encoded]]] = deque()
    with tempfile.NamedTemporaryFile() as file, ProcessPoolExecutor(number, context, _start, (file.name,)) as pool:
        # As an argument it would not fit into the pipe of a new process, and each start would wait for imports.
        pickle.dump(encoder, file)
        file.flush()
        try:
            for place, task in tasks:
                waiting.append((place, pool.submit(_encode, task)))
                while len(waiting) >= number + _QUEUED_TASKS or (waiting and waiting[0][1].done()):
                    place, encoded = waiting.popleft()
                    yield place, encoded.result()
            for place, encoded in waiting:
                yield place, encoded.result()
        except BrokenProcessPool as error:
            raise WorkerDied(
                "a process that tokenizes was killed, often because the host ran out of memory; use fewer --workers or "
                "a smaller --max-document-bytes"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


_encoder: Callable[[Task], Encoded]


def _start(encoder_file: str) -> None:
    """Initialize a process that tokenizes. encoder_file: has the pickled encoder."""
    global _encoder
    # A terminal sends these to all of its processes; the parent process ends this one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with_parent, args=(parent.sentinel,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has its own process
    _encoder = pickle.loads(Path(encoder_file).read_bytes())


def _encode(task: Task) -> Encoded:
    return _encoder(task)


def _exit_with_parent(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
