"""One task to tokens: what the processes that tokenize do, a function of the task alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data.prepare.huge import Limit
from data.prepare.records import Record, Single, Task, is_held_out
from data.tokenizers.interface import TextTokenizer

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
