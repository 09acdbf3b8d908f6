"""From text to tokens: JSON Lines, Parquet, text files or a hub dataset into Megatron's `.bin` and `.idx`.

    records (where it came from, text or what is wrong) -> training or held out -> tokens, end of document -> writers

Parquet, text and hub names are read by `datasets`, as streams: no copy of the corpus is made on disk. JSON Lines are
read here, because the json loader of `datasets` gives up a whole file for one malformed line.

A record that gives no document (malformed JSON, no string in the field, not UTF-8, empty) is skipped, counted by its
problem and, for the first few, reported with its place; only a share of them above a limit is an error.

The output is a function of the records in order, the tokenizer and the held-out share. Threads only encode the
documents of one batch side by side, so their number (RAYON_NUM_THREADS, by default all cores) changes no byte.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import json
import lzma
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from data.indexed_dataset import IndexedDatasetWriter, dtype_for_vocabulary, index_path, tokens_path
from data.tokenizer import TextTokenizer, train_tokenizer

FORMATS = ("json", "parquet", "text")
TEXT_UNITS = ("document", "paragraph", "line")

# Documents encoded at once. The tokenizer's own record of a batch takes some 40 times its bytes.
_BATCH_BYTES = 4 << 20
_BATCH_DOCUMENTS = 4096
_ROWS_AT_ONCE = 1000
_FILES_AT_ONCE = 1000
_REPORTED_RECORDS = 5
_PROGRESS_SECONDS = 60.0
# A byte-level BPE of 128k entries is settled by then, and its word counts still fit into memory.
TOKENIZER_TRAINING_BYTES = 1 << 30

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class Record(NamedTuple):
    """One record: where it stands, and its text or, if there is none, the problem."""

    where: str
    text: str
    problem: str | None = None


# A piece of a corpus (a file, or a hub dataset's split) that can be read any number of times.
Part = Callable[[], Iterator[Record]]


@dataclass
class SplitCount:
    """What went into one dataset: documents, tokens (an end of document each), bytes of UTF-8 text."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


@dataclass
class Ingested:
    """What `ingest` wrote and skipped; `validation` is empty where nothing was held out."""

    output: Path
    train: SplitCount = field(default_factory=SplitCount)
    validation: SplitCount = field(default_factory=SplitCount)
    malformed: Counter[str] = field(default_factory=Counter)  # records by problem

    @property
    def records(self) -> int:
        return self.train.documents + self.validation.documents + self.malformed.total()

    def summary(self) -> str:
        """One line for each dataset, one for each problem."""
        rows = [(str(self.output), self.train), (str(validation_prefix(self.output)), self.validation)]
        lines = [
            f"{name}: {count.documents:,} documents, {count.tokens:,} tokens, {count.text_bytes:,} bytes of text"
            for name, count in rows
            if count.documents
        ]
        lines.append(f"malformed: {self.malformed.total():,} of {self.records:,} records skipped")
        return "\n".join(lines + [f"  {count:,} {problem}" for problem, count in self.malformed.most_common()])


def validation_prefix(output: str | Path) -> Path:
    """Where the held-out documents of `output` go: `<output>_validation`."""
    return Path(f"{output}_validation")


def refuse_existing(paths: Sequence[Path]) -> None:
    """Raise FileExistsError if one of the paths exists."""
    for path in paths:
        if path.exists():
            raise FileExistsError(f"{path} exists already; choose another name, or remove it to prepare it again")


def output_files(output: str | Path) -> list[Path]:
    """The files that `ingest` makes of an output prefix, the held-out ones included."""
    return [path(prefix) for prefix in (output, validation_prefix(output)) for path in (index_path, tokens_path)]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files of all paths and glob patterns (`**` too), each pattern's sorted, none twice.

    Raises FileNotFoundError for a pattern without a file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        literal = Path(pattern)
        names = [pattern] if literal.is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in names if Path(name).is_file()]
        if not files:
            raise FileNotFoundError(f"no file matches {pattern!r}; give a path or a quoted pattern: 'corpus/*.jsonl'")
        found.update(dict.fromkeys(files))
    return list(found)


def open_files(format: str, files: Sequence[Path], field: str = "text", text_unit: str = "document") -> list[Part]:
    """The files as parts of a corpus, in their order.

    format "json": one JSON object a line (also .gz, .bz2, .xz), the text under `field`. "parquet": the text is the
    column `field`. "text": plain UTF-8; a document is a whole file, or with text_unit a paragraph or a line of it.
    Raises ValueError for another format or unit, or a compression that the standard library cannot read.
    """
    if format not in FORMATS:
        raise ValueError(f"the format is {format!r}; choose one of {', '.join(FORMATS)}")
    if text_unit not in TEXT_UNITS:
        raise ValueError(f"the unit of text is {text_unit!r}; choose one of {', '.join(TEXT_UNITS)}")
    for path in files:
        if path.suffix in (".zip", ".zst"):
            raise ValueError(f"{path} is compressed as {path.suffix}; unpack it, or compress it as .gz or .xz")
    if format == "json":
        return [partial(_read_json_lines, path, field) for path in files]
    if format == "parquet":
        return [partial(_read_parquet, path, field) for path in files]
    # The loader takes 6 ms to start, which is nothing for a file of many documents, but much for one of a page.
    at_once = _FILES_AT_ONCE if text_unit == "document" else 1
    return [partial(_read_text, files[i : i + at_once], text_unit) for i in range(0, len(files), at_once)]


def open_hub(name: str, split: str, field: str = "text", subset: str | None = None) -> list[Part]:
    """One split of a dataset of the Hugging Face hub, or of a local folder of data files, as one part of a corpus.

    It streams over the network at every reading, and its malformed records are the loader's to judge.
    """
    where = " ".join(filter(None, (name, subset, split)))
    return [partial(_read_rows, where, field, path=name, name=subset, split=split)]


def _read_json_lines(path: Path, field: str) -> Iterator[Record]:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield _record_of_json(f"{path}:{number}", line, field)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged or was cut short ({error}); copy it again") from error


def _record_of_json(where: str, line: bytes, field: str) -> Record:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Record(where, "", "not UTF-8")
    except (ValueError, RecursionError):
        return Record(where, "", "not JSON (one object a line is read)")
    if not isinstance(value, dict):
        return Record(where, "", "not a JSON object")
    return _record(where, value, field)


def _record(where: str, row: dict[str, Any], field: str) -> Record:
    """The record of a row; any of its values may be of any type."""
    if field not in row:
        return Record(where, "", f"without a field {field!r}")
    text = row[field]
    if not isinstance(text, str):
        return Record(where, "", f"whose field {field!r} is no string")
    if not text.strip():
        return Record(where, "", "empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair
        return Record(where, "", "not UTF-8")
    return Record(where, text)


def _read_parquet(path: Path, field: str) -> Iterator[Record]:
    return _read_rows(str(path), field, path="parquet", data_files=[glob.escape(str(path))], split="train")


def _read_text(files: Sequence[Path], unit: str) -> Iterator[Record]:
    """The text of one file, or of several if the unit is the document."""
    rows = _read_rows(
        f"{files[0]}" if len(files) == 1 else f"one of {files[0]} to {files[-1]}",
        "text",
        path="text",
        data_files=[glob.escape(str(path)) for path in files],
        split="train",
        sample_by=unit,
        # Every byte is a Latin-1 character: the loader passes on what is not UTF-8, and it is told apart below.
        encoding="latin-1",
    )
    for i, row in enumerate(rows):
        where = str(files[i]) if unit == "document" else f"{files[0]}, {unit} {i + 1}"
        if row.problem == "empty" and unit != "document":
            continue  # a blank line separates
        try:
            text = row.text.encode("latin-1").decode("utf-8")
        except UnicodeDecodeError:
            yield Record(where, "", "not UTF-8")
        else:
            first = i == 0 or unit == "document"
            yield _record(where, {"text": text.removeprefix("\ufeff") if first else text}, "text")


def _read_rows(where: str, field: str, **arguments: Any) -> Iterator[Record]:
    """The rows that `datasets.load_dataset(**arguments)` streams. Raises ValueError for whatever it raises."""
    try:
        rows = datasets.load_dataset(**arguments, streaming=True)
        if columns := rows.column_names:
            # Reading the others takes time; a missing field is the rows' problem, and one column counts them.
            rows = rows.select_columns([field] if field in columns else columns[:1])
        number = 0
        for batch in rows.iter(_ROWS_AT_ONCE):
            for values in zip(*batch.values(), strict=True):
                number += 1
                yield _record(f"{where}, row {number}", dict(zip(batch, values, strict=True)), field)
    except Exception as error:  # the loaders promise no type
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"datasets cannot read {where}: {reason}") from error


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is for validation: about `share` of all are; equal documents are on the same side."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def train_on(parts: Sequence[Part], vocab_size: int, validation: float) -> TextTokenizer:
    """Train a tokenizer of at most vocab_size ids on the documents that are not held out.

    Of a large corpus it reads TOKENIZER_TRAINING_BYTES, the same number from the beginning of each part.
    Raises ValueError for a vocab_size that is too small or a share outside [0, 1).
    """
    _check_validation(validation)

    def texts() -> Iterator[str]:
        for part in parts:
            left = TOKENIZER_TRAINING_BYTES // len(parts)
            for record in part():
                if record.problem is None and not is_held_out(record.text, validation):
                    yield record.text
                    left -= len(record.text.encode("utf-8"))
                    if left <= 0:
                        break

    return train_tokenizer(texts(), vocab_size)


def ingest(
    parts: Sequence[Part],
    output: str | Path,
    tokenizer: TextTokenizer,
    validation: float = 0.01,
    max_malformed: float = 0.01,
    report: Callable[[str], None] = lambda line: None,
    new_tokenizer: str | Path | None = None,
) -> Ingested:
    """Write the documents of all parts, in order, to the dataset `output`, and held-out ones to `<output>_validation`.

    validation: share of documents held out by `is_held_out`, 0 for none. max_malformed: largest share of records
    that may be skipped. report: called with a line for each of the first skipped records, and now and then with
    progress. new_tokenizer: where to save the tokenizer along with the data. Every document ends with `eod_id`.

    Nothing appears under its name before all is written. Raises FileExistsError if one of the outputs exists;
    ValueError for a share outside [0, 1), more malformed records than allowed, a split without a document, or a
    file that cannot be read at all.
    """
    output = Path(output)
    _check_validation(validation)
    if not 0 <= max_malformed <= 1:
        raise ValueError(f"the largest share of malformed records is {max_malformed}; it must be from 0 to 1")
    refuse_existing([*output_files(output), *([Path(new_tokenizer)] if new_tokenizer is not None else [])])
    output.parent.mkdir(parents=True, exist_ok=True)
    done = Ingested(output)
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    with ExitStack() as stack:
        writers = {False: stack.enter_context(IndexedDatasetWriter(output, dtype))}
        if validation > 0:
            writers[True] = stack.enter_context(IndexedDatasetWriter(validation_prefix(output), dtype))
        for texts in _batches(parts, done, report):
            for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
                held_out = is_held_out(text, validation)
                writers[held_out].add_document(np.array([*tokens, tokenizer.eod_id]))
                count = done.validation if held_out else done.train
                count.documents += 1
                count.tokens += len(tokens) + 1
                count.text_bytes += len(text.encode("utf-8"))
        _check(done, validation, max_malformed)
        if new_tokenizer is not None:
            _save_whole(tokenizer, Path(new_tokenizer))
        # The training set last: whoever sees it finds its validation set and its tokenizer too.
        for held_out in sorted(writers, reverse=True):
            writers[held_out].finalize()
    return done


def _batches(parts: Sequence[Part], done: Ingested, report: Callable[[str], None]) -> Iterator[list[str]]:
    """The documents of all parts in order, cut into batches; what is no document is counted and reported."""
    texts: list[str] = []
    size = 0
    next_progress = time.monotonic() + _PROGRESS_SECONDS
    for part in parts:
        for record in part():
            if record.problem is not None:
                done.malformed[record.problem] += 1
                if done.malformed.total() <= _REPORTED_RECORDS:
                    report(f"skipped {record.where}: {record.problem}")
                continue
            texts.append(record.text)
            size += len(record.text)
            if size >= _BATCH_BYTES or len(texts) >= _BATCH_DOCUMENTS:
                yield texts
                texts, size = [], 0
                if time.monotonic() >= next_progress:
                    next_progress = time.monotonic() + _PROGRESS_SECONDS
                    report(f"{done.records:,} records, {done.train.tokens + done.validation.tokens:,} tokens so far")
    if texts:
        yield texts


def _check_validation(share: float) -> None:
    if not 0 <= share < 1:
        raise ValueError(f"the share held out for validation is {share}; it must be at least 0 and below 1")


def _check(done: Ingested, validation: float, max_malformed: float) -> None:
    malformed, records = done.malformed.total(), done.records
    if malformed > max_malformed * records:
        problems = ", ".join(f"{count:,} {problem}" for problem, count in done.malformed.most_common())
        raise ValueError(
            f"{malformed:,} of {records:,} records are malformed ({problems}), more than the share {max_malformed:g} "
            "allowed; mend them, name the right field and format, or allow a larger share"
        )
    if records == malformed:
        raise ValueError("the input holds no documents; nothing was written")
    for name, count in (("training", done.train), ("validation", done.validation)):
        if count.documents == 0 and (validation > 0 or name == "training"):
            raise ValueError(
                f"none of the {records - malformed:,} documents is for {name} with a validation share of "
                f"{validation:g}; choose another share (0 holds nothing out) or give more documents"
            )


def _save_whole(tokenizer: TextTokenizer, path: Path) -> None:
    """Save under a temporary name and rename, so that no half file is taken for a tokenizer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    tokenizer.save(temporary)
    os.replace(temporary, path)
