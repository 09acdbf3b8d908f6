"""The phases of a run whose samples are a Megatron run's (`data.order=megatron`), as the loader asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.bundle import DataBundle, TokenSource
from data.megatron_indices import split_range
from data.megatron_order import Layout, MegatronOrder, MegatronRun, lay_out
from data.phase_lengths import Phase
from data.phases import Location, PhaseSchedule, SourceRange
from data.token_range import TokenRange


class MegatronSchedule(PhaseSchedule):
    """A PhaseSchedule whose phases take Megatron's samples, from `stand_on` on.

    Phases in a row with one blend are one for Megatron: a batch size that grows changes no order.
    """

    order: MegatronOrder

    def __init__(
        self, phases: Sequence[Phase], num_steps: int, global_batch_size: int, sequence_length: int, run: MegatronRun
    ) -> None:
        super().__init__(phases, num_steps, global_batch_size, sequence_length)
        blends = {phase.name: phase.blend or {} for phase in phases}
        spans: list[tuple[int, int, Mapping[str, float]]] = []
        for span in self.spans:
            if not span.num_samples:
                continue
            if spans and span.blend_start == spans[-1][0]:
                spans[-1] = (spans[-1][0], span.end, spans[-1][2])
            else:
                # Megatron normalizes the floats as they are written; whole numbers in proportion can be a bit off.
                spans.append((span.start, span.end, blends[span.name]))
        self.layouts: list[Layout] = lay_out(spans, run)

    def stand_on(self, order: MegatronOrder) -> None:
        """Take the samples of `order`, which has these `layouts`."""
        self.order = order

    def locate(self, global_sample: int) -> Location:
        """Phase, source and ordinal of a global sample. Raises IndexError off the run."""
        return Location(self.span_at(global_sample).name, *self.order.locate(global_sample))

    def source_ranges(self, start: int, end: int) -> list[SourceRange]:
        """What the global samples [start, end) are, by phase and source. Raises IndexError off the run."""
        if not 0 <= start <= end <= self.num_samples:
            raise IndexError(f"global samples [{start}, {end}) are outside a run of {self.num_samples}")
        return [
            SourceRange(span.name, *found)
            for span in self.spans
            for found in self.order.ranges(max(start, span.start), min(end, span.end))
        ]

    def position(self, global_sample: int) -> dict[str, dict[str, int]]:
        """counts: of each source in [0, global_sample)."""
        counts: dict[str, int] = {}
        for name, first, last in self.order.ranges(0, global_sample):
            counts[name] = counts.get(name, 0) + last - first
        return {"counts": counts, "blend_counts": {}}

    def stand_at(self, global_sample: int, position: Mapping[str, Mapping[str, int]]) -> None:
        """Nothing has to be walked."""

    def advance(self, global_sample: int) -> None:
        """Nothing has to be walked."""

    def behind(self, past: Sequence[Mapping[str, Any]], consumed: int) -> PhaseSchedule:
        """Raises ValueError: what Megatron laid out for a run is of that run."""
        raise ValueError(
            f"with data.order=megatron the {consumed} samples that were consumed keep their phases and batches; "
            "restore train.global_batch_size and the lengths of the phases up to there"
        )


def megatron_run(data: Any) -> MegatronRun:
    """What the group `data` of a configuration says of it."""
    given = data.megatron
    return MegatronRun(
        given.split, given.train_samples, given.consumed_samples, given.phases, given.weighted, given.surplus
    )


def check_megatron(data: Any) -> None:
    """Raise ValueError for settings of a configuration's `data.megatron` that are none, or would have no effect."""
    run = megatron_run(data)
    if data.order != "megatron" and run != MegatronRun():
        raise ValueError(
            f"data.megatron has no effect with data.order={data.order}; leave it out, or choose data.order=megatron"
        )
    split_range(run.split, 0, 1)
    if run.phases == "relaunched" and len(data.phases) == 1:
        raise ValueError("data.megatron.phases=relaunched has no effect with one phase; leave it out")


def open_megatron(
    schedule: MegatronSchedule,
    streams: Mapping[str, TokenSource],
    run: MegatronRun,
    sequence_length: int,
    seed: int,
    vocab_size: int,
    cache_dir: str | Path | None,
) -> MegatronOrder:
    """The order of a schedule, which stands on it afterwards; builds its indices or finds them.

    Raises ValueError for a source that is not there, and as MegatronOrder does.
    """
    schedule.check_sources(streams)
    order = MegatronOrder(schedule.layouts, streams, run, sequence_length, seed, vocab_size, cache_dir)
    schedule.stand_on(order)
    return order


def held_out_by_split(bundle: DataBundle, split: Sequence[float] | None) -> Mapping[str, TokenSource]:
    """The validation sets of a run: those that it names, else the second share of Megatron's split of each source.

    A source of which the split leaves nothing to it has none.
    """
    if bundle.validation or split is None:
        return bundle.validation
    found = {}
    for name, stream in bundle.train.items():
        first, end = split_range(split, 1, stream.num_sequences)
        if first < end:
            found[name] = TokenRange(stream, first, end)
    return found
