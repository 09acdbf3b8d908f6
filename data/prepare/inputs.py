"""What a corpus is made of: files by patterns, or a dataset by name, as parts that can be read any number of times."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data.prepare.compressed import Watch, refuse_archives
from data.prepare.huge import Limit
from data.prepare.records import Task
from data.prepare.rows import hub_tasks, is_saved_folder, package, parquet_tasks, saved_folder_tasks
from data.prepare.text_files import TEXT_UNITS, document_tasks, json_tasks, unit_tasks

FORMATS = ("json", "parquet", "text")
_FILES_AT_ONCE = 1000


@dataclass(frozen=True)
class Part:
    """A piece of a corpus: a file, some small text files, or a dataset.

    tasks: called with the limit of documents and a function that hears the position in the part's `size`; gives the
    same tasks each time. files: what it is read from, which must not change while it is; none for a dataset.
    """

    tasks: Callable[[Limit, Watch], Iterator[Task]]
    files: tuple[Path, ...] = ()

    def stamps(self) -> list[tuple[str, int, int]]:
        """(path, bytes, time of the last change in ns) of each file: what tells a changed one."""
        found = [(path, path.stat()) for path in self.files]
        return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files of all paths and glob patterns (`**` too), each pattern's sorted, none twice.

    Raises FileNotFoundError for a pattern without a file.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        literal = Path(pattern)
        names = [pattern] if literal.is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in names if Path(name).is_file()]
        if not files and literal.is_dir():
            raise FileNotFoundError(
                f"{pattern} is a folder; give a quoted pattern of its files: '{pattern}/**/*.jsonl'"
            )
        if not files:
            raise FileNotFoundError(f"no file matches {pattern!r}; give a path or a quoted pattern: 'corpus/*.jsonl'")
        for file in files:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def open_files(format: str, files: Sequence[Path], field: str = "text", text_unit: str = "document") -> list[Part]:
    """The files as parts of a corpus, in their order.

    format "json": one JSON object a line, the text under `field`. "parquet": the text is the column `field`. "text":
    plain UTF-8; a document is a whole file, or with text_unit a paragraph or a line of it. JSON and text may be
    compressed: .gz, .bz2, .xz, .zst.

    Raises ValueError for another format or unit, an archive, or a package that is missing; OSError for a file that
    cannot be opened.
    """
    if format not in FORMATS:
        raise ValueError(f"the format is {format!r}; choose one of {', '.join(FORMATS)}")
    if text_unit not in TEXT_UNITS:
        raise ValueError(f"the unit of text is {text_unit!r}; choose one of {', '.join(TEXT_UNITS)}")
    if format == "parquet":
        package("pyarrow", "--format parquet")
    for path in files:
        refuse_archives(path)
        with open(path, "rb"):
            pass  # rather now than after hours
    if format == "text" and text_unit == "document":
        groups = [tuple(files[i : i + _FILES_AT_ONCE]) for i in range(0, len(files), _FILES_AT_ONCE)]
        return [Part(partial(document_tasks, list(group)), group) for group in groups]
    if format == "text":
        return [Part(partial(unit_tasks, path, text_unit), (path,)) for path in files]
    read = json_tasks if format == "json" else parquet_tasks
    return [Part(partial(read, path, field), (path,)) for path in files]


def open_dataset(name: str, split: str | None, field: str = "text", subset: str | None = None) -> list[Part]:
    """One split, or slice of a split, of a dataset as one part of a corpus.

    name: a folder that `save_to_disk` wrote, a local folder of data files, or a name of the Hugging Face hub, which
    is read over the network each time. Raises ValueError for a split or subset that is missing or means nothing, and
    where the package `datasets` is not installed.
    """
    package("datasets", f"the dataset {name}")
    if is_saved_folder(name):
        if subset is not None:
            raise ValueError(f"{name} was written by save_to_disk and has no subset {subset!r}; leave it out")
        files = tuple(sorted(path for path in Path(name).rglob("*") if path.is_file()))
        return [Part(partial(saved_folder_tasks, name, split, field), files)]
    if split is None:
        raise ValueError(f"of the dataset {name} a split is needed, such as train or train[:1%]; name it with --split")
    return [Part(partial(_hub_tasks, name, split, field, subset))]


def _hub_tasks(name: str, split: str, field: str, subset: str | None, limit: Limit, watch: Watch) -> Iterator[Task]:
    return hub_tasks(name, split, field, subset, limit)
