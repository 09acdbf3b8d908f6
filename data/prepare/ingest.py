"""From text to tokens: the parts of a corpus into one pair, and its held-out documents into another.

    part -> tasks (cut here) -> records, split, tokens (encoded on all cores) -> two growing files -> .bin, .idx, .json

A record that gives no document (malformed JSON, no string in the field, not UTF-8, empty) is skipped, counted by its
problem and, for the first few, reported with its place; a share of them above a limit ends it as soon as that is clear.

The output is a function of the records in order, the tokenizer and the options: neither the number of processes nor
how often it was killed and started again changes a byte.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from data.indexed_dataset import dtype_for_vocabulary, index_path, tokens_path
from data.prepare.encode import REPORTED_RECORDS, SPLITS, Encoded, Encoder, SplitCount, records_within
from data.prepare.huge import Limit
from data.prepare.index import Lengths, facts_path, tokenizer_facts, write_facts, write_index
from data.prepare.inputs import Part
from data.prepare.processes import encoding_processes
from data.prepare.records import Task, is_held_out
from data.prepare.work import State, WorkFolder
from data.tokenizer import load_tokenizer, train_tokenizer
from data.tokenizers.hugging_face import HuggingFaceTokenizer
from data.tokenizers.interface import TextTokenizer

# A byte-level BPE of 128k entries is settled by then, and its word counts still fit into memory.
TOKENIZER_TRAINING_BYTES = 1 << 30
# How much work a kill costs at most.
SAVE_SECONDS = 30.0
# From here on twice the share allowed is no bad luck.
CLEAR_AFTER_RECORDS = 1000
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Options:
    """What shapes the output besides the inputs and the tokenizer.

    validation: share of documents held out by `is_held_out`, 0 for none. max_document_bytes: of UTF-8; what is larger
    goes by `huge`, a row of POLICIES. bos_token: begins every document, None for none. eod: whether the tokenizer's
    end of a document ends each. max_malformed: largest share of records that may be skipped; another one goes on
    with what was begun.
    """

    validation: float = 0.01
    max_malformed: float = 0.01
    max_document_bytes: int = 16 << 20
    huge: str = "split"
    bos_token: str | None = None
    eod: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(
                f"the share held out for validation is {self.validation}; it must be at least 0 and below 1"
            )
        if not 0 <= self.max_malformed <= 1:
            raise ValueError(f"the largest share of malformed records is {self.max_malformed}; it must be from 0 to 1")
        self.limit()

    def limit(self, scratch: Path | None = None) -> Limit:
        """The limit of documents; nameless files of larger ones go to the folder `scratch`."""
        return Limit(self.max_document_bytes, self.huge, self.validation, scratch)


@dataclass(frozen=True)
class NewTokenizer:
    """A tokenizer to be trained on the training documents: at most vocab_size ids, saved as `path` with the data."""

    vocab_size: int
    path: Path


@dataclass
class Ingested:
    """What `ingest` wrote and skipped; `validation` is empty where nothing was held out."""

    output: Path
    tokenizer: TextTokenizer
    state: State
    huge: str

    @property
    def train(self) -> SplitCount:
        return self.state.counts["train"]

    @property
    def validation(self) -> SplitCount:
        return self.state.counts["validation"]

    def summary(self) -> str:
        """One line for each dataset, one for each problem."""
        rows = [(str(self.output), self.train), (str(validation_prefix(self.output)), self.validation)]
        lines = [
            f"{name}: {count.documents:,} documents, {count.tokens:,} tokens, {count.text_bytes:,} bytes of text"
            for name, count in rows
            if count.documents
        ]
        if self.state.huge:
            done = {"split": "split into several", "skip": "skipped"}[self.huge]
            lines.append(f"huge: {self.state.huge:,} documents above the largest size {done}")
        malformed = self.state.malformed
        lines.append(f"malformed: {malformed.total():,} of {self.state.records:,} records skipped")
        return "\n".join(lines + [f"  {count:,} {problem}" for problem, count in malformed.most_common()])


# Hears how far it is: bytes of the input files that are read, of how many (0: nobody knows), and what came of them.
Progress = Callable[[int, int, State], None]


def validation_prefix(output: str | Path) -> Path:
    """Where the held-out documents of `output` go: `<output>_validation`."""
    return Path(f"{output}_validation")


def output_files(output: str | Path) -> list[Path]:
    """The files that `ingest` makes of an output prefix, the held-out ones included."""
    prefixes = (output, validation_prefix(output))
    return [path(prefix) for prefix in prefixes for path in (index_path, tokens_path, facts_path)]


def refuse_existing(paths: Sequence[Path]) -> None:
    """Raise FileExistsError if one of the paths exists."""
    for path in paths:
        if path.exists():
            raise FileExistsError(f"{path} exists already; choose another name, or remove it to prepare it again")


def train_on(parts: Sequence[Part], vocab_size: int, options: Options) -> HuggingFaceTokenizer:
    """Train a tokenizer of at most vocab_size ids on the documents that are not held out.

    Of a large corpus it reads TOKENIZER_TRAINING_BYTES, the same number from the beginning of each part.
    Raises ValueError for a vocab_size that is too small.
    """
    limit = options.limit()

    def texts() -> Iterator[str]:
        for part in parts:
            left = TOKENIZER_TRAINING_BYTES // len(parts)
            records = (r for task in part.tasks(limit, _unwatched) for r in records_within(task, limit, Encoded()))
            for record in records:
                if record.problem is None and not (
                    is_held_out(record.text, options.validation) if record.held_out is None else record.held_out
                ):
                    yield record.text
                    left -= len(record.text.encode("utf-8"))
                    if left <= 0:
                        break

    return train_tokenizer(texts(), vocab_size)


def ingest(
    parts: Sequence[Part],
    output: str | Path,
    tokenizer: TextTokenizer | NewTokenizer,
    options: Options | None = None,
    *,
    source: dict[str, Any] | None = None,
    workers: int = 0,
    report: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> Ingested:
    """Write the documents of all parts, in order, to the dataset `output`, and held-out ones to `<output>_validation`.

    source: how the parts were opened, of JSON types; it goes into the facts, and only the same goes on. workers:
    processes that tokenize, 0: none but this one. report: called with a line for each of the first skipped records.

    Nothing appears under its name before all is written; until then it is in `<output>.parts`, and the same call goes
    on behind what is done there. Raises FileExistsError if one of the outputs exists; ValueError for other options than
    those it was begun with, inputs that changed, more malformed records than allowed, a split without a document, or a
    file that cannot be read; WorkerDied.
    """
    options = options or Options()
    output = Path(output)
    new = tokenizer if isinstance(tokenizer, NewTokenizer) else None
    settings: dict[str, Any] = {
        **{f"source {name}": value for name, value in (source or {}).items()},
        "tokenizer": {"train": new.vocab_size} if new else tokenizer_facts(_given(tokenizer)),
        "validation": options.validation,
        "max_document_bytes": options.max_document_bytes,
        "huge": options.huge,
        "bos_token": options.bos_token,
        "eod": [options.eod, None if new else _given(tokenizer).eod_token],
    }
    work = WorkFolder(output, settings)
    run = _Run(parts, output, work, options, source or {}, report, progress)
    try:
        if not work.state.published:
            refuse_existing([*output_files(output), *([new.path] if new else [])])
        run.tokenizer = run.train(new) if new else _given(tokenizer)
        if not work.state.published:
            run.encode(workers)
            run.check()
            run.write_indices()
        run.publish(new)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and work.is_whole and not work.state.published:
            work.save()
        if work.saved:
            work.close()
        else:
            work.remove()
        raise
    return Ingested(output, run.tokenizer, work.state, options.huge)


def _given(tokenizer: TextTokenizer | NewTokenizer) -> TextTokenizer:
    assert isinstance(tokenizer, TextTokenizer)
    return tokenizer


def _unwatched(position: int) -> None:
    """Nobody follows."""


@dataclass
class _Run:
    """One call of `ingest`, step by step."""

    parts: Sequence[Part]
    output: Path
    work: WorkFolder
    options: Options
    source: dict[str, Any]
    report: Callable[[str], None]
    progress: Progress | None
    tokenizer: TextTokenizer = field(init=False)

    @property
    def splits(self) -> Sequence[str]:
        return SPLITS if self.options.validation > 0 else SPLITS[:1]

    def train(self, new: NewTokenizer) -> TextTokenizer:
        """The new tokenizer, of an earlier call if that came so far."""
        path = self.work.path / _TOKENIZER
        if self.work.state.published and not path.exists():
            return load_tokenizer(new.path)
        if not path.exists():
            begin = time.monotonic()
            tokenizer = train_on(self.parts, new.vocab_size, self.options)
            temporary = path.with_suffix(".new")
            tokenizer.save(temporary)
            temporary.rename(path)
            if time.monotonic() - begin >= SAVE_SECONDS:
                self.work.save()
        return load_tokenizer(path)

    def encode(self, workers: int) -> None:
        """Tokenize what is not done yet."""
        state, options = self.work.state, self.options
        stamps = [part.stamps() for part in self.parts]
        self.work.check_stamps(stamps)
        self.work.open_splits(self.splits)
        before = () if options.bos_token is None else (self.tokenizer.id_of(options.bos_token),)
        after = (self.tokenizer.eod_id,) if options.eod else ()
        dtype = dtype_for_vocabulary(self.tokenizer.vocab_size)
        encoder = Encoder(self.tokenizer, dtype, before, after, options.limit())
        sizes = [sum(size for _, size, _ in part) for part in stamps]
        starts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
        places: deque[tuple[int, int, int]] = deque()  # part, tasks of it, position; of the tasks that are under way

        def tasks() -> Iterator[Task]:
            first = state.tasks
            for number in range(state.part, len(self.parts)):
                position = starts[number]

                def watch(inside: int, start: int = starts[number]) -> None:
                    nonlocal position
                    position = start + inside

                limit = options.limit(self.work.path)
                for count, task in enumerate(self.parts[number].tasks(limit, watch), start=1):
                    if count > first:
                        places.append((number, count, position))
                        yield task
                first = 0
                if self.parts[number].stamps() != stamps[number]:
                    name = self.parts[number].files[0]
                    raise ValueError(f"{name}, or one read along with it, changed while it was read; start again")

        next_save = time.monotonic() + SAVE_SECONDS
        with encoding_processes(encoder, workers) as processes:
            for encoded in processes.encode(tasks()):
                number, count, position = places.popleft()
                self.work.add(number, count, encoded)
                for where, problem in encoded.reports:
                    if state.reported < REPORTED_RECORDS:
                        state.reported += 1
                        self.report(f"skipped {where}: {problem}")
                if self.progress is not None:
                    self.progress(position, starts[-1], state)
                self._check_malformed(at_end=False)
                if time.monotonic() >= next_save:
                    self.work.save()
                    next_save = time.monotonic() + SAVE_SECONDS
        state.part, state.tasks = len(self.parts), 0
        if self.progress is not None:
            self.progress(starts[-1], starts[-1], state)

    def _check_malformed(self, at_end: bool) -> None:
        state, allowed = self.work.state, self.options.max_malformed
        malformed, records = state.malformed.total(), state.records
        is_clear = records >= CLEAR_AFTER_RECORDS and malformed > 2 * allowed * records
        if (malformed and allowed == 0) or is_clear or (at_end and malformed > allowed * records):
            problems = ", ".join(f"{count:,} {problem}" for problem, count in state.malformed.most_common())
            first = "" if at_end else "the first "
            raise ValueError(
                f"{malformed:,} of {first}{records:,} records are malformed ({problems}), more than the share "
                f"{allowed:g} allowed; mend them, name the right field and format, or allow a larger share"
            )

    def check(self) -> None:
        """Raise ValueError for too many malformed records, or a split without a document."""
        self._check_malformed(at_end=True)
        counts = self.work.state.counts
        documents = sum(count.documents for count in counts.values())
        if documents == 0:
            raise ValueError("the input holds no documents; nothing was written")
        for split in self.splits:
            if counts[split].documents == 0:
                name = {"train": "training"}.get(split, split)
                raise ValueError(
                    f"none of the {documents:,} documents is for {name} with a validation share of "
                    f"{self.options.validation:g}; choose another share (0 holds nothing out) or give more documents"
                )

    def write_indices(self) -> None:
        """The index and the facts of each split, in the work folder."""
        self.work.save()
        dtype = dtype_for_vocabulary(self.tokenizer.vocab_size)
        options = self.options
        facts: dict[str, Any] = {
            "dtype": dtype.name,
            "tokenizer": tokenizer_facts(self.tokenizer),
            "eod": {"token": self.tokenizer.eod_token, "id": self.tokenizer.eod_id} if options.eod else None,
            "bos": None
            if options.bos_token is None
            else {"token": options.bos_token, "id": self.tokenizer.id_of(options.bos_token)},
            "options": {
                **self.source,
                "validation": options.validation,
                "max_document_bytes": options.max_document_bytes,
                "huge": options.huge,
            },
            "version": _version(),
        }
        for split in self.splits:
            files = {ending: self.work.path / f"{split}.{ending}" for ending in ("bin", "idx")}
            lengths = Lengths(self.work.path / f"{split}.lengths", self.work.state.counts[split].documents)
            write_index(files["idx"], dtype, [lengths], None)
            facts_file = self.work.path / f"{split}.json"
            write_facts(facts_file, self.work.state.counts[split], files, {"split": split, **facts})

    def publish(self, new: NewTokenizer | None) -> None:
        """Give all files their names."""
        # The training set last: whoever sees it finds its validation set and its tokenizer too; and its index at the
        # very end, without which there is no dataset.
        renamings = {_TOKENIZER: new.path} if new else {}
        for split in reversed(self.splits):
            prefix = self.output if split == "train" else validation_prefix(self.output)
            for ending, path in (("json", facts_path), ("bin", tokens_path), ("idx", index_path)):
                renamings[f"{split}.{ending}"] = path(prefix)
        self.work.publish(renamings)


def _version() -> str | None:
    try:
        return metadata.version("megatron_fp4")
    except metadata.PackageNotFoundError:
        return None
