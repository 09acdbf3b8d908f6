"""Tokenizes the parts of a corpus into one `.bin`/`.idx` pair, and its held-out documents into another.

    part -> tasks (readers.py) -> records, split, tokens (tokenize.py, on all cores) -> growing files -> .bin, .idx

A malformed record (not JSON, no string in the field, not UTF-8, not encodable by the tokenizer) is skipped and counted
by its problem; the first few are reported with their place. The preparation fails once their share is clearly above the
limit. A record without text is skipped too, but is not an error.

The output is a function of the records in order, the tokenizer and the options. It does not depend on the number of
processes or on interruptions. The work in progress is in the folder OUTPUT.parts:

    lock                       locked by the running command
    tokenizer.json             the tokenizer that was trained for this output
    train.bin, train.lengths   tokens and lengths of the documents so far; validation.* likewise
    state.json                 how much of these files is valid, and the settings with which a command may resume

Every SAVE_SECONDS the files are synced to disk and state.json is replaced. After a kill the files are truncated to the
valid length, and the rest is computed again. At the end state.json is marked as published, and the files are renamed to
their final names one after the other; a command that finds the mark continues the renaming.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data.indexed import document_tokens_text, dtype_for_vocabulary, write_index
from data.prepare import tokenize
from data.prepare.readers import NOT_JSON, Part, Task
from data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

# More text hardly changes a byte-level BPE of 128k entries, and this much still fits into memory as word counts.
TOKENIZER_TRAINING_BYTES = 1 << 30
# The most work that a kill loses.
SAVE_SECONDS = 30.0
# After this number of records, twice the allowed share of malformed ones is not chance.
CLEAR_AFTER_RECORDS = 1000
_FACTS_FORMAT = 1
# Of the work folder: increase it when inputs are cut into other tasks, or a file there has another meaning.
_WORK_FORMAT = 5


@dataclass(frozen=True)
class NewTokenizer:
    """A tokenizer to train on the training documents: at most vocab_size ids, saved as `path` together with the
    data. bos_token: begins every document; None: no token does."""

    vocab_size: int
    path: Path
    bos_token: str | None = None


@dataclass
class State:
    """How far a work folder is: all parts before number `part` are done, and `tasks` tasks of this part. settings: what
    determines the output. stamps: of each part."""

    settings: dict[str, Any]
    stamps: list[list[Any]] = field(default_factory=list)
    part: int = 0
    tasks: int = 0
    counts: dict[str, tokenize.SplitCount] = field(
        default_factory=lambda: {split: tokenize.SplitCount() for split in tokenize.SPLITS}
    )
    malformed: dict[str, int] = field(default_factory=dict)
    reported: int = 0
    empty: int = 0
    huge: int = 0
    published: bool = False

    @property
    def num_malformed(self) -> int:
        return sum(self.malformed.values())

    @property
    def records(self) -> int:
        return sum(count.documents for count in self.counts.values()) + self.num_malformed

    @property
    def problems(self) -> list[str]:
        """How many records are malformed, by problem."""
        return [f"{count:,} {problem}" for problem, count in Counter(self.malformed).most_common()]


@dataclass
class Prepared:
    """What `prepare` wrote and skipped."""

    output: Path
    tokenizer: TextTokenizer
    state: State

    def summary(self) -> str:
        """One line for each dataset, one for each problem."""
        state, lines = self.state, []
        for split, count in state.counts.items():
            if count.documents:
                sizes = f"{count.documents:,} documents, {count.tokens:,} tokens, {count.text_bytes:,} bytes of text"
                lines.append(f"{prefix_of(self.output, split)}: {sizes}")
        lines.append(document_tokens_text(self.tokenizer.document_tokens))
        if state.huge:
            lines.append(f"huge: {state.huge:,} documents above the largest size split into several")
        if state.empty:
            lines.append(f"empty: {state.empty:,} records without text left out")
        lines.append(f"malformed: {state.num_malformed:,} of {state.records:,} records skipped")
        return "\n".join(lines + [f"  {problem}" for problem in state.problems])


# Called with the bytes of the input files that were read, their total (0: unknown), and the state.
Progress = Callable[[int, int, State], None]


def prefix_of(output: Path, split: str) -> Path:
    """The prefix of a split's pair: `<output>`, or `<output>_validation` for held-out documents."""
    return output if split == "train" else Path(f"{output}_validation")


def refuse_existing(paths: Sequence[Path]) -> None:
    """Raise FileExistsError if one of the paths exists."""
    for path in paths:
        if path.exists():
            raise FileExistsError(f"{path} exists already; choose another name, or remove it to prepare it again")


def prepare(
    parts: Sequence[Part],
    output: Path,
    tokenizer: TextTokenizer | NewTokenizer,
    options: tokenize.Options,
    *,
    source: dict[str, Any] | None = None,
    workers: int = 0,
    report: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda position, total, state: None,
) -> Prepared:
    """Write the documents of all parts, in order, to the dataset `output`, and held-out ones to `<output>_validation`.
    The same call resumes an interrupted one.

    source: how the parts were opened, JSON for the facts; the same to resume. workers: processes that tokenize; 0:
    tokenize in this process. report: called with a line for each of the first skipped records.

    Raises FileExistsError if an output exists; ValueError for other settings than before, for inputs that changed, too
    many malformed records, a split without documents, or a file that cannot be read; WorkerDied.
    """
    new = tokenizer if isinstance(tokenizer, NewTokenizer) else None
    settings = {f"source {name}": value for name, value in (source or {}).items()}
    settings |= {key: value for key, value in asdict(options).items() if key != "max_malformed"}
    if isinstance(tokenizer, NewTokenizer):
        settings["tokenizer"] = {"train": tokenizer.vocab_size, "bos": tokenizer.bos_token}
    else:
        settings["tokenizer"] = {**tokenizer.facts, **tokenizer.document_tokens}
    work = WorkFolder(output, {**settings, "format": _WORK_FORMAT})
    splits = tokenize.SPLITS if options.validation > 0 else tokenize.SPLITS[:1]
    # In this order, so that whoever finds a training index also finds its tokenizer, validation set and tokens.
    renamings = {"tokenizer.json": new.path} if new else {}
    for split in reversed(splits):
        for ending in ("json", "bin", "idx"):
            renamings[f"{split}.{ending}"] = Path(f"{prefix_of(output, split)}.{ending}")
    with work.remove_unless_saved():
        if not work.state.published:
            refuse_existing([*renamings.values()])
        if isinstance(tokenizer, NewTokenizer):
            tokenizer = _trained(parts, tokenizer, options, work)
        if not work.state.published:
            _encode(parts, tokenizer, options, work, splits, workers, report, progress)
            _check(work.state, options, splits)
            work.save()
            _write_indices(tokenizer, options, work, splits, source or {})
        work.publish(renamings)
    return Prepared(output, tokenizer, work.state)


def _trained(parts: Sequence[Part], new: NewTokenizer, options: tokenize.Options, work: WorkFolder) -> TextTokenizer:
    """The new tokenizer, from an earlier call if that trained it; otherwise trained on the documents that are not held
    out. Of a large corpus it uses TOKENIZER_TRAINING_BYTES, equally many from the beginning of each part."""

    def texts() -> Iterator[str]:
        for part in parts:
            left = TOKENIZER_TRAINING_BYTES // len(parts)
            for record in (record for _, task in part.tasks() for record in task()):
                if record.problem is None and not tokenize.is_held_out(record.text, options.validation):
                    yield from tokenize.pieces_of(record.text, options.max_document_bytes)
                    left -= len(record.text.encode("utf-8"))
                    if left <= 0:
                        break

    path = work.path / "tokenizer.json"
    if work.state.published and not path.exists():
        return load_tokenizer(new.path, bos_token=new.bos_token)
    if not path.exists():
        begin = time.monotonic()
        temporary = path.with_suffix(".new")
        train_tokenizer(texts(), new.vocab_size).save(temporary)
        temporary.rename(path)
        if time.monotonic() - begin >= SAVE_SECONDS:
            work.save()
    return load_tokenizer(path, bos_token=new.bos_token)


def _encode(
    parts: Sequence[Part],
    tokenizer: TextTokenizer,
    options: tokenize.Options,
    work: WorkFolder,
    splits: Sequence[str],
    workers: int,
    report: Callable[[str], None],
    progress: Progress,
) -> None:
    state, stamps = work.state, [part.stamp() for part in parts]
    touched = state.part + (state.tasks > 0)
    for number in range(touched):
        if state.stamps[number : number + 1] != stamps[number : number + 1]:
            name = parts[number].files[0] if number < len(parts) and parts[number].files else "the list of inputs"
            raise ValueError(f"{name} has changed since it was prepared; remove {work.path} to begin again")
    state.stamps = stamps
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    work.open(splits, dtype.itemsize)
    encoder = partial(tokenize.encode, tokenizer, dtype, options)
    starts = list(accumulate((size for size, _ in stamps), initial=0))

    def tasks() -> Iterator[tuple[tuple[int, int, int], Task]]:
        """The tasks to do, each with (its part, its number in the part from 1, the position in all input bytes)."""
        first = state.tasks
        for number in range(state.part, len(parts)):
            for count, (position, task) in enumerate(parts[number].tasks(), start=1):
                if count > first:
                    yield (number, count, starts[number] + position), task
            first = 0
            if parts[number].stamp() != stamps[number]:
                name = parts[number].files[0]
                raise ValueError(f"{name}, or a file of the same part, changed while it was read; start again")

    next_save = time.monotonic() + SAVE_SECONDS
    for (number, count, position), encoded in tokenize.encode_in_processes(encoder, tasks(), workers):
        work.add(number, count, encoded)
        for where, problem in encoded.reports[: tokenize.REPORTED_RECORDS - state.reported]:
            state.reported += 1
            report(f"skipped {where}: {problem}")
        progress(position, starts[-1], state)
        _check_malformed(state, options, at_end=False)
        if time.monotonic() >= next_save:
            work.save()
            next_save = time.monotonic() + SAVE_SECONDS
    state.part, state.tasks = len(parts), 0
    progress(starts[-1], starts[-1], state)


def _check_malformed(state: State, options: tokenize.Options, at_end: bool) -> None:
    allowed, malformed, records = options.max_malformed, state.num_malformed, state.records
    if allowed and records < CLEAR_AFTER_RECORDS:
        # Of few records, one that the tokenizer cannot encode says nothing about the tokenizer.
        malformed -= state.malformed.get(tokenize.UNENCODABLE, 0)
    is_clear = records >= CLEAR_AFTER_RECORDS and malformed > 2 * allowed * records
    if (malformed and allowed == 0) or is_clear or (at_end and malformed > allowed * records):
        first = "" if at_end else "the first "
        raise ValueError(
            f"{malformed:,} of {first}{records:,} records are malformed ({', '.join(state.problems)}), more than the "
            f"allowed share {allowed:g}; {_remedy(state)}"
        )


def _remedy(state: State) -> str:
    """What helps against too many malformed records: nothing that the same check would refuse again."""
    remedies = ["correct them"]
    if NOT_JSON in state.malformed:
        remedies.append("give Parquet, Arrow and CSV as --dataset and plain text with --format text")
    if any("field" in problem for problem in state.malformed):
        remedies.append("give the right --field")
    if tokenize.UNENCODABLE in state.malformed:
        remedies.append("give another --tokenizer")
    if state.num_malformed < state.records:
        remedies.append(f"raise --max-malformed to {math.ceil(100 * state.num_malformed / state.records) / 100:g}")
    return ", or ".join(remedies)


def _check(state: State, options: tokenize.Options, splits: Sequence[str]) -> None:
    _check_malformed(state, options, at_end=True)
    if not all(state.counts[split].documents for split in splits):
        train, held_out = (state.counts[split].documents for split in tokenize.SPLITS)
        raise ValueError(
            f"the input has {train:,} documents for training and, with --validation {options.validation:g}, "
            f"{held_out:,} for validation; give more text, or another share (0 for no validation set)"
        )


def _write_indices(
    tokenizer: TextTokenizer, options: tokenize.Options, work: WorkFolder, splits: Sequence[str], source: dict[str, Any]
) -> None:
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    facts: dict[str, Any] = {
        "dtype": dtype.name,
        "tokenizer": tokenizer.facts,
        **tokenizer.document_tokens,
        "options": source | {name: getattr(options, name) for name in ("validation", "max_document_bytes")},
    }
    for split in splits:
        files = {ending: work.path / f"{split}.{ending}" for ending in ("bin", "idx")}
        count = work.state.counts[split]
        lengths = np.memmap(work.path / f"{split}.lengths", "<i4", "r", shape=(count.documents,))
        write_index(files["idx"], dtype, [lengths])
        write_facts(work.path / f"{split}.json", count, files, {"split": split, **facts})


def write_facts(path: Path, counts: tokenize.SplitCount, files: dict[str, Path], facts: dict[str, Any]) -> None:
    """Write the facts of a pair whose `files` ("bin", "idx") are complete, and sync them to disk."""
    hashes = {}
    for name, file in files.items():
        with open(file, "rb") as opened:
            hashes[name] = hashlib.file_digest(opened, "sha256").hexdigest()
    _write_json(path, {"format": _FACTS_FORMAT, **asdict(counts), "sha256": hashes, **facts})


class WorkFolder:
    """The locked work folder of an output, new or from an interrupted command. settings: JSON values. Raises ValueError
    if another command works in it, or if the interrupted command had other settings."""

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        self.path = work_path(output)
        self.path.mkdir(parents=True, exist_ok=True)
        self._state_file = self.path / "state.json"
        self._files: dict[str, BinaryIO] = {}
        with contextlib.ExitStack() as opened:
            lock = opened.enter_context(open(self.path / "lock", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:  # PermissionError on network file systems
                raise ValueError(f"another command is preparing {output} now; wait for it, or stop it") from error
            self.state = State(json.loads(json.dumps(settings)))
            if self._state_file.is_file():
                self._resume()
            else:  # new, or killed before the first save
                for file in self.path.iterdir():
                    if file.name != "lock":
                        file.unlink()
            self._opened = opened.pop_all()

    def _resume(self) -> None:
        settings, again = self.state.settings, f"remove {self.path} to begin again"
        try:
            content = json.loads(self._state_file.read_bytes())
            counts = {split: tokenize.SplitCount(**count) for split, count in content["counts"].items()}
            self.state = State(**{**content, "counts": counts})
            before = dict(self.state.settings)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._state_file} is damaged or from another version ({error}); {again}") from error

        def shown(value: Any) -> str:
            text = json.dumps(value, ensure_ascii=False)
            return text if len(text) <= 60 else f"{text[:57]}..."

        if others := [
            f"{name} {shown(before.get(name))} instead of {shown(settings.get(name))}"
            for name in {**before, **settings}
            if before.get(name) != settings.get(name)
        ]:
            raise ValueError(
                f"{self.path} has an unfinished preparation with {', '.join(others)}; give the same to resume it, or "
                f"{again}"
            )

    def open(self, splits: Sequence[str], token_bytes: int) -> None:
        """Open the files of the splits and truncate them to what is valid. Raises ValueError if they are shorter."""
        for split in splits:
            count = self.state.counts[split]
            for ending, counted in (("bin", count.tokens * token_bytes), ("lengths", count.documents * 4)):
                path = self.path / f"{split}.{ending}"
                file = self._files[path.name] = self._opened.enter_context(open(path, "ab"))  # noqa: SIM115
                if file.tell() < counted:
                    raise ValueError(f"{path} has fewer than {counted} bytes; remove {self.path} to begin again")
                file.truncate(counted)

    def add(self, part: int, tasks: int, encoded: tokenize.Encoded) -> None:
        """Append the documents of a task; `tasks` tasks of this part are then done."""
        state = self.state
        for split, tokens in encoded.tokens.items():
            self._files[f"{split}.bin"].write(tokens.tobytes())
            self._files[f"{split}.lengths"].write(encoded.lengths[split].astype("<i4").tobytes())
            state.counts[split].add(encoded.counts[split])
        state.malformed = dict(Counter(state.malformed) + encoded.malformed)
        state.empty += encoded.empty
        state.huge += encoded.huge
        state.part, state.tasks = part, tasks

    def save(self) -> None:
        """Sync everything to disk and replace state.json, so that a kill loses nothing of it."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        _write_json(self._state_file, asdict(self.state))

    @contextlib.contextmanager
    def remove_unless_saved(self) -> Iterator[None]:
        """After an error remove the folder, unless something was saved that a command can resume."""
        try:
            yield
        except BaseException:
            self._opened.close()
            if not self._state_file.is_file():
                shutil.rmtree(self.path)
            raise

    def publish(self, renamings: dict[str, Path]) -> None:
        """Rename the files of this folder in this order, then remove the folder. Raises FileExistsError."""
        refuse_existing([target for name, target in renamings.items() if (self.path / name).exists()])
        if not self.state.published:
            self.state.published = True
            self.save()
        for name, target in renamings.items():
            if (self.path / name).exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.rename(self.path / name, target)
                _sync_folder(target.parent)
        self._opened.close()
        shutil.rmtree(self.path)


def work_path(output: Path) -> Path:
    """The work folder of an output."""
    return Path(f"{output}.parts")


def _write_json(path: Path, content: Any) -> None:
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
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
