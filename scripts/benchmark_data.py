"""The loader alone: how many tokens a second one rank gets, and how long its steps wait for them.

    python scripts/benchmark_data.py
    python scripts/benchmark_data.py --prefix /data/web --sequence-lengths 8192 --workers 1 2

Without a prefix it makes a pair of files of random tokens in documents of some 1,000 tokens in a temporary folder. The
files come from the page cache; a disk's own speed is not measured. Each row is a run of its own: first the steps are
taken as fast as they come (tokens/s; MB/s as on disk; how much of a core the rank itself needs for that), then at the
pace of a model that takes twice as long for each, where the wait is what the loader leaves exposed. On a machine that
does nothing else: the loader is several processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from data.loader import MicroBatchLoader
from data.phase_lengths import Phase
from data.phases import PhaseSchedule
from data.samples import ORDERS, SampleSource
from megatron_fp4.config.data_schema import DataConfig
from megatron_fp4.runtime.closed_pipe import end_without_reader


class Result(NamedTuple):
    """Of one setting. start: seconds to the first step. rank_cpu: cores. waits: seconds a step, at half the speed."""

    start: float
    tokens_per_second: float
    rank_cpu: float
    waits: list[float]


def measure(
    stream: IndexedDataset, order: str, length: int, size: int, workers: int, options: argparse.Namespace
) -> Result:
    """Load for about options.seconds, in steps of options.micro_batches micro-batches of `size` rows of `length`."""
    batch = size * options.micro_batches
    schedule = PhaseSchedule([Phase("all", 1.0, {"web": 1.0})], 1_000_000, batch)
    source = SampleSource("web", stream, length, seed=0, vocab_size=1 << 17, order=order)
    loader = MicroBatchLoader(schedule, {"web": source}, size, 0, 1, workers, prefetch=options.prefetch)
    steps = loader.steps(0, schedule.num_steps)
    began = time.perf_counter()
    next(steps)
    start = time.perf_counter() - began
    for _ in range(options.prefetch + 1):  # what was prepared meanwhile is not its speed
        next(steps)
    began, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < options.seconds:
        next(steps)
        count += 1
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    pace = 2 * seconds / count
    waits: list[float] = []
    until = time.perf_counter() + options.seconds
    while time.perf_counter() < until or len(waits) < 3:
        time.sleep(pace)  # a model on a GPU leaves the cores alone
        next(steps)
        waits.append(loader.data_wait)
    steps.close()  # type: ignore[attr-defined]
    return Result(start, count * batch * length / seconds, cpu / seconds, waits[1:])


def make_pair(folder: Path, tokens: int = 1 << 26) -> Path:
    """A pair of files of random tokens, documents of 1 to 2,000 of them; returns its prefix."""
    draw = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "random", np.int32) as writer:
        stream = draw.integers(0, 100_000, tokens, dtype=np.int32)
        ends = np.cumsum(draw.integers(1, 2_000, tokens // 1_000 * 2))
        for document in np.split(stream, ends[ends < tokens]):
            writer.add_document(document)
    return folder / "random"


def rows(stream: IndexedDataset, options: argparse.Namespace) -> Iterator[str]:
    """The table, line by line."""
    cores = len(os.sched_getaffinity(0))
    yield f"{cores} cores, {options.micro_batches} micro-batches a step, {options.prefetch} steps ahead"
    yield "    order     seq  micro-batch  workers    tokens/s   MB/s  rank's core  first step   wait p50       p99"
    settings = product(options.orders, options.sequence_lengths, options.micro_batch_sizes, options.workers)
    for order, length, size, workers in settings:
        found = measure(stream, order, length, size, workers, options)
        speed, megabytes = found.tokens_per_second / 1e6, found.tokens_per_second * stream.dtype.itemsize / 1e6
        p50, p99 = 1e3 * np.percentile(found.waits, [50, 99])
        yield (
            f"{order:>9}  {length:>6}  {size:>11}  {workers:>7}  {speed:>8.1f} M  {megabytes:>5.0f}  "
            f"{found.rank_cpu:>11.0%}  {found.start:>8.2f} s  {p50:>6.1f} ms  {p99:>5.1f} ms"
        )


def main() -> None:
    """Measure what the command line asks for."""
    defaults = DataConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=Path, help="of a .bin/.idx pair, instead of random tokens")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=[*ORDERS], help="as data.order")
    parser.add_argument("--sequence-lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--workers", type=int, nargs="+", default=[defaults.num_workers])
    parser.add_argument("--prefetch", type=int, default=defaults.prefetch)
    parser.add_argument("--micro-batches", type=int, default=64, help="a step")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each half of a measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stream = IndexedDataset(options.prefix or make_pair(Path(folder)))
        for line in rows(stream, options):
            print(line, flush=True)


if __name__ == "__main__":
    end_without_reader()
    main()
