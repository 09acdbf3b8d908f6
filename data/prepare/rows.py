"""Tables, row by row: Parquet files, `datasets` folders that `save_to_disk` wrote, and datasets of the hub."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data.prepare.compressed import Watch
from data.prepare.huge import Limit
from data.prepare.records import MISSING, TASK_BYTES, Rows, Task, record_of_value

_ROWS_AT_ONCE = 1000
_PARQUET_ROWS_AT_ONCE = 128  # of any size each; the reader unpacks them at once


def package(name: str, what: str) -> Any:
    """A package that not everybody installs; `what` needs it. Raises ValueError, with the remedy, where it is not."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = name.partition(".")[0].replace("pyarrow", "parquet")
        raise ValueError(f'{what} needs a package ({error}); pip install "megatron_fp4[{extra}]"') from error


def parquet_tasks(path: Path, field: str, limit: Limit, watch: Watch) -> Iterator[Task]:
    """A Parquet file: its column `field`. Raises ValueError if it is damaged or none."""
    pq = package("pyarrow.parquet", str(path))
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            rows, size = file.metadata.num_rows, path.stat().st_size

            def columns() -> Iterator[list[Any]]:
                if field not in file.schema_arrow.names:
                    yield from missing(rows)
                    return
                number = 0
                for batch in file.iter_batches(_PARQUET_ROWS_AT_ONCE, columns=[field]):
                    number += batch.num_rows
                    watch(size * number // max(rows, 1))
                    yield _values(batch.column(0))

            yield from row_tasks(str(path), columns(), field, limit)
    except (package("pyarrow", str(path)).ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(
            f"{path} is damaged or no Parquet file ({_in_a_line(error)}); copy or write it again"
        ) from error


def row_tasks(where: str, batches: Iterable[list[Any]], field: str, limit: Limit) -> Iterator[Task]:
    """Values of one column, batch by batch."""
    first = 1  # row of the first of `values`
    values: list[Any] = []
    size = 0
    for batch in batches:
        for value in batch:
            if isinstance(value, str) and len(value) * 4 > limit.max_bytes:
                record = record_of_value(f"{where}, row {first + len(values)}", value, field)
                if record.problem is None and limit.exceeded_by(value):
                    if values:
                        yield Rows(where, first, values, field)
                    yield from limit.records_of(record)
                    first, values, size = first + len(values) + 1, [], 0
                    continue
            values.append(value)
            size += len(value) if isinstance(value, str) else 8
            if size >= TASK_BYTES or len(values) >= 8 * _ROWS_AT_ONCE:
                yield Rows(where, first, values, field)
                first, values, size = first + len(values), [], 0
    if values:
        yield Rows(where, first, values, field)


def is_saved_folder(name: str) -> bool:
    """Whether `save_to_disk` wrote this folder: one split, or several of a dictionary."""
    return any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))


def saved_folder_tasks(name: str, split: str | None, field: str, limit: Limit, watch: Watch) -> Iterator[Task]:
    """A folder that `datasets` saved, or a split or slice of it (`train[:1%]`). Raises ValueError if it is damaged."""
    datasets = package("datasets", name)
    where = " ".join(filter(None, (name, split)))
    try:
        found = datasets.load_from_disk(name)
    except Exception as error:  # it promises no type
        raise ValueError(f"datasets cannot read {where}: {_in_a_line(error)}") from error
    splits = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
    if split is None:
        if len(splits) > 1:
            raise ValueError(f"{name} has several splits; name one with --split: {', '.join(splits)}")
        tables = list(splits.values())
    else:
        try:
            lengths = {key: len(table) for key, table in splits.items()}
            chosen = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
            tables = [splits[part.splitname].select(range(part.from_, part.to)) for part in chosen]
        except (ValueError, KeyError, AssertionError) as error:
            raise ValueError(
                f"{name} has no split {split!r} ({_in_a_line(error)}); its splits: {', '.join(splits)}"
            ) from error
    total, size = sum(map(len, tables)), size_of(Path(name))

    def columns() -> Iterator[list[Any]]:
        number = 0
        for table in tables:
            if field not in table.column_names:
                yield from missing(len(table))
                continue
            for batch in table.select_columns([field]).with_format("arrow").iter(_ROWS_AT_ONCE):
                number += batch.num_rows
                watch(number * size // total)
                yield _values(batch.column(0))

    yield from row_tasks(where, _explained(where, columns()), field, limit)


def _values(column: Any) -> list[Any]:
    """The values of an Arrow column; those that are not UTF-8 as strings that do not encode."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(package("pyarrow", "text that is not UTF-8").large_binary()).to_pylist()
        return [None if value is None else value.decode("utf-8", "surrogateescape") for value in values]


def missing(rows: int) -> Iterator[list[Any]]:
    """So many rows without the field."""
    for start in range(0, rows, _ROWS_AT_ONCE):
        yield [MISSING] * min(_ROWS_AT_ONCE, rows - start)


def hub_tasks(name: str, split: str, field: str, subset: str | None, limit: Limit) -> Iterator[Task]:
    """A split of a dataset of the hub, or of a local folder of data files, as `datasets` reads it.

    A whole split streams; a slice (`train[:1%]`) is first loaded into the cache of `datasets`, which alone can slice.
    Raises ValueError for whatever it raises.
    """
    datasets = package("datasets", name)
    where = " ".join(filter(None, (name, subset, split)))

    def columns() -> Iterator[list[Any]]:
        rows: Any = datasets.load_dataset(name, subset, split=split, streaming="[" not in split and "+" not in split)
        if rows.column_names:
            # Reading the others takes time; if there is no such field, one column counts the rows.
            rows = rows.select_columns([field if field in rows.column_names else rows.column_names[0]])
        for batch in rows.iter(_ROWS_AT_ONCE):
            values = next(iter(batch.values()))
            yield values if field in batch else [MISSING] * len(values)

    yield from row_tasks(where, _explained(where, columns()), field, limit)


def _explained(where: str, rows: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """The rows; ValueError for whatever `datasets` raises, which promises no type."""
    try:
        yield from rows
    except Exception as error:
        raise ValueError(f"datasets cannot read {where}: {_in_a_line(error)}") from error


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
