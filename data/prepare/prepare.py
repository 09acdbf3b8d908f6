"""`.idx` and the facts beside it, written in blocks: memory does not grow with the number of documents.

The folder OUTPUT.parts: what is done so far, so that the same command goes on behind it after any end.

    lock                       held by the command that works here
    settings.json              what shapes the output; another command must not go on here
    stamps.json                the inputs as they were
    tokenizer.json             a tokenizer that was trained for this output
    train.bin, train.lengths   tokens and lengths of documents so far; validation.* the same
    state.json                 how much of all of it counts, and which tasks it came from

The two files of a split only grow. Now and then they are synced to disk, then state.json is replaced; after a kill
what lies behind state.json is cut off and made again. At the end the files are published: state.json says so first,
then they are renamed one after the other, and a command that finds it published goes on renaming.

How far a preparation is: a bar on a terminal, else a line a minute.

From text to tokens: the parts of a corpus into one pair, and its held-out documents into another.

    part -> tasks (cut here) -> records, split, tokens (encoded on all cores) -> two growing files -> .bin, .idx, .json

A record that gives no document (malformed JSON, no string in the field, not UTF-8, empty) is skipped, counted by its
problem and, for the first few, reported with its place; a share of them above a limit ends it as soon as that is clear.

The output is a function of the records in order, the tokenizer and the options: neither the number of processes nor
how often it was killed and started again changes a byte.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TextIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION, dtype_for_vocabulary, facts_path, index_path, tokens_path
from data.prepare.readers import Limit, Part, Task, is_held_out
from data.prepare.tokenize import (
    REPORTED_RECORDS,
    SPLITS,
    Encoded,
    Encoder,
    SplitCount,
    encoding_processes,
    records_within,
)
from data.tokenizer import HuggingFaceTokenizer, TextTokenizer, load_tokenizer, train_tokenizer

BLOCK = 1 << 20
FACTS_FORMAT = 1


@dataclass(frozen=True)
class Lengths:
    """int32 lengths of sequences in a file, `number` of them from byte `offset` on, read in blocks."""

    path: Path
    number: int
    offset: int = 0

    def blocks(self) -> Iterator[np.ndarray]:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            left = self.number
            while left:
                block = np.fromfile(file, dtype="<i4", count=min(BLOCK, left))
                if not len(block):
                    raise ValueError(f"{self.path} was cut short; prepare it again")
                left -= len(block)
                yield block


def write_index(
    path: Path, dtype: np.dtype[Any], lengths: list[Lengths], ends: list[Iterator[np.ndarray]] | None
) -> None:
    """Write an `.idx` of sequences that lie back to back in the order of `lengths`, and sync it to disk.

    ends: the sequence behind the last one of each document, int64, for each of `lengths` in blocks, counted within it;
    None: each sequence is a document.
    """
    sequences = sum(part.number for part in lengths)
    code = next(code for code, known in DTYPE_CODES.items() if known == dtype)
    with open(path, "wb") as file:
        # The number of documents is known at the end only, if it is not that of the sequences.
        file.write(HEADER.pack(MAGIC, VERSION, code, sequences, sequences + 1))
        for part in lengths:
            for block in part.blocks():
                file.write(block.astype("<i4").tobytes())
        pointer = 0
        for part in lengths:
            for block in part.blocks():
                sizes = block.astype("<i8") * dtype.itemsize
                starts = pointer + np.cumsum(sizes) - sizes
                file.write(starts.astype("<i8").tobytes())
                pointer += int(sizes.sum())
        file.write(np.zeros(1, dtype="<i8").tobytes())
        documents = first = 0
        for number, part in enumerate(lengths):
            for block in _counting(part.number) if ends is None else ends[number]:
                file.write((block + first).astype("<i8").tobytes())
                documents += len(block)
            first += part.number
        file.seek(0)
        file.write(HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
        file.flush()
        os.fsync(file.fileno())


def _counting(number: int) -> Iterator[np.ndarray]:
    for start in range(0, number, BLOCK):
        yield np.arange(start + 1, min(start + BLOCK, number) + 1, dtype=np.int64)


def tokenizer_facts(tokenizer: TextTokenizer) -> dict[str, Any]:
    """What tells one tokenizer from another, its file's place aside."""
    return {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint(), "vocab_size": tokenizer.vocab_size}


def write_facts(path: Path, counts: SplitCount, files: dict[str, Path], facts: dict[str, Any]) -> None:
    """Write the facts of a pair whose `files` ("bin", "idx") are whole, and sync them to disk."""
    hashes = {name: sha256_of(file) for name, file in files.items()}
    content = {"format": FACTS_FORMAT, **asdict(counts), "sha256": hashes, **facts}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_STATE, _SETTINGS, _STAMPS, _LOCK = "state.json", "settings.json", "stamps.json", "lock"
Stamps = list[list[tuple[str, int, int]]]


@dataclass
class State:
    """What of a work folder counts: `tasks` tasks of part number `part`, and all of those before it."""

    part: int = 0
    tasks: int = 0
    counts: dict[str, SplitCount] = field(default_factory=lambda: {split: SplitCount() for split in SPLITS})
    sizes: dict[str, int] = field(default_factory=dict)  # bytes by name of a file
    malformed: Counter[str] = field(default_factory=Counter)
    reported: int = 0
    huge: int = 0
    published: bool = False

    @property
    def records(self) -> int:
        """Documents and malformed records so far."""
        return sum(count.documents for count in self.counts.values()) + self.malformed.total()

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        # asdict would take a Counter for a list of its items.
        return {**asdict(replace(self, malformed=Counter())), "malformed": dict(self.malformed)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> State:
        """The inverse of `to_json`."""
        counts = {split: SplitCount(**count) for split, count in content["counts"].items()}
        return cls(**{**content, "counts": counts, "malformed": Counter(content["malformed"])})


class WorkFolder:
    """The work folder of an output, locked; made if it is not there, else gone on with.

    settings: JSON types by name of an option. Raises ValueError if another command works in it or its settings are
    others; the message names the options.
    """

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        self.path = work_path(output)
        self.path.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, BinaryIO] = {}
        self._lock = open(self.path / _LOCK, "w")  # noqa: SIM115 - held until close
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise ValueError(f"another command is preparing {output} right now; wait for it, or stop it") from error
            self._check_settings(settings)
            self.state = self._read_state()
        except BaseException:
            self._lock.close()
            raise
        self.saved = (self.path / _STATE).is_file()
        self.is_whole = True  # not in the middle of a task's documents

    def _check_settings(self, settings: dict[str, Any]) -> None:
        settings = json.loads(json.dumps(settings))
        path = self.path / _SETTINGS
        if not (self.path / _STATE).is_file():
            # New, or a kill came before anything was worth keeping.
            self._clear()
            _write_json(path, settings)
            return
        before = json.loads(path.read_bytes())
        others = [
            f"{name} {_shown(before.get(name))} instead of {_shown(settings.get(name))}"
            for name in {**before, **settings}
            if before.get(name) != settings.get(name)
        ]
        if others:
            raise ValueError(
                f"{self.path} holds an unfinished preparation with {', '.join(others)}; give the same to go on with "
                "it, or remove the folder to begin again"
            )

    def _clear(self) -> None:
        for file in self.path.iterdir():
            if file.name != _LOCK:
                file.unlink()

    def _read_state(self) -> State:
        path = self.path / _STATE
        if not path.is_file():
            return State()
        try:
            return State.from_json(json.loads(path.read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove {self.path} to begin again") from error

    def check_stamps(self, stamps: Stamps) -> None:
        """Raise ValueError if an input that was read, wholly or in part, is another one now; keep the stamps."""
        path = self.path / _STAMPS
        touched = self.state.part + (self.state.tasks > 0)
        if self.saved and path.is_file():
            before = json.loads(path.read_bytes())
            for old, new in zip(before[:touched], stamps[:touched], strict=False):
                for was, now in zip(old, new, strict=False):
                    if list(was) != list(now):
                        what = "has changed" if was[0] == now[0] else f"stands where {was[0]} was"
                        raise ValueError(
                            f"{now[0]} {what} since it was prepared; remove {self.path} to begin again with what is "
                            "there"
                        )
            if [len(old) for old in before[:touched]] != [len(new) for new in stamps[:touched]]:
                raise ValueError(f"the inputs are others than those of {self.path}; remove it to begin again")
        _write_json(path, stamps)

    def open_splits(self, splits: Sequence[str]) -> None:
        """Open the files of the splits, cut to what counts. Raises ValueError if they are shorter than that."""
        for split in splits:
            for ending in ("bin", "lengths"):
                name = f"{split}.{ending}"
                file = open(self.path / name, "ab")  # noqa: SIM115 - closed by close
                self._files[name] = file
                size, counted = file.tell(), self.state.sizes.get(name, 0)
                if size < counted:
                    raise ValueError(
                        f"{self.path / name} has {size} bytes where {counted} were written; remove {self.path} to "
                        "begin again"
                    )
                file.truncate(counted)
                file.seek(0, os.SEEK_END)

    def add(self, part: int, tasks: int, encoded: Encoded) -> None:
        """Append the documents of a task, so that `tasks` tasks of this part are done."""
        self.is_whole = False
        for split, tokens in encoded.tokens.items():
            self._files[f"{split}.bin"].write(tokens.tobytes())
            self._files[f"{split}.lengths"].write(encoded.lengths[split].tobytes())
            self.state.counts[split].add(encoded.counts[split])
        self.state.malformed.update(encoded.malformed)
        self.state.huge += encoded.huge
        self.state.part, self.state.tasks = part, tasks
        self.is_whole = True

    def save(self) -> None:
        """Make all of it count, whatever comes."""
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            self.state.sizes[name] = file.tell()
        _write_json(self.path / _STATE, self.state.to_json())
        self.saved = True

    def publish(self, renamings: dict[str, Path]) -> None:
        """Rename the files of this folder, in this order, and remove it.

        Raises FileExistsError rather than overwrite.
        """
        for name, target in renamings.items():
            if (self.path / name).exists() and target.exists():
                raise FileExistsError(f"{target} exists already; choose another name, or remove it to prepare it again")
        if not self.state.published:
            self.state.published = True
            self.save()
        for name, target in renamings.items():
            if (self.path / name).exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.rename(self.path / name, target)
                _sync_folder(target.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        # The state after what only makes it longer to remove: until then the same command comes back to this place.
        for file in self.path.iterdir():
            if file.name not in (_LOCK, _STATE, _SETTINGS):
                file.unlink()
        (self.path / _STATE).unlink(missing_ok=True)
        self.close()
        shutil.rmtree(self.path)

    def close(self) -> None:
        """Let go of the files and the lock; what was saved stays."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._lock.close()


def work_path(output: Path) -> Path:
    """Where an unfinished output lies."""
    return Path(f"{output}.parts")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _write_json(path: Path, content: Any) -> None:
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


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
