"""The data of a run from its configuration; `pretrain.py` passes this module to the trainer.

It opens the sources, lays out the phases, and gives each rank its share. Training begins only if all ranks opened the
same data. `config` is the whole configuration; `mesh` has `batch` (`rank`, `size` and `group` of the ranks that compute
other micro-batches), `consecutive` and `device`. megatron_fp4/training/providers.py says what training needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from data.builtin import check_builtin, open_builtin
from data.indexed import DataBundle, TokenIdError
from data.loader import MicroBatch, MicroBatchLoader
from data.megatron_order import MegatronSchedule, check_megatron, held_out_by_split
from data.order import Samples, SampleSource
from data.schedule import Phase, PhaseSchedule, PhaseSpan
from data.sources import check_indexed, open_indexed
from data.storage import default_cache_dir
from data.validation import TargetStatistics, ValidationSet

__all__ = ["MicroBatch", "RunData", "check_kind", "default_cache_dir", "open_alone", "open_data", "phases"]


class Kind(NamedTuple):
    """open(data, vocab_size): opens the sources; raises FileNotFoundError or ValueError. check(data): raises ValueError
    for settings that are missing or have no effect. data: the group `data` of a configuration."""

    open: Callable[[Any, int], DataBundle]
    check: Callable[[Any], None]


KINDS = {
    "builtin": Kind(lambda data, vocab_size: open_builtin(vocab_size, data.cache_dir), check_builtin),
    "indexed": Kind(
        lambda data, vocab_size: open_indexed(
            vocab_size,
            data.sources,
            data.validation,
            data.tokenizer,
            data.eod_token,
            None if data.cache_dir is None else Path(data.cache_dir) / "remote",
        ),
        check_indexed,
    ),
}


_PHASE_KEYS = ("name", "fraction", "steps", "tokens", "global_batch_size", "sequence_length")


_MANY_EPOCHS = 4  # "Scaling data-constrained language models": up to here repeated text is nearly as good as new


class PlannedUse(NamedTuple):
    """One source in one phase. share: of the phase's samples. epochs: over the source in this phase. epochs_done: from
    the beginning of the run to the end of this phase."""

    source: str
    share: float
    epochs: float
    epochs_done: float


@dataclass(frozen=True)
class RunData:
    """The opened data of a run. statistics: of the targets of each held-out set; empty from `open_alone`. refusal: what
    the loader raises for data that the user has to correct; after another error, another start may succeed."""

    bundle: DataBundle
    loader: MicroBatchLoader
    validation: list[ValidationSet]
    statistics: dict[str, TargetStatistics] = field(default_factory=dict)
    refusal: ClassVar[type[Exception]] = TokenIdError

    @property
    def phases(self) -> PhaseSchedule:
        """The data phases; after a resume they include the past phases of the checkpoint."""
        return self.loader.schedule

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What must be the same in every start of a run: its tokenizer. The loader's state has the consumed data."""
        return {"tokenizer": self.bundle.tokenizer and self.bundle.tokenizer.fingerprint()}

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of how the data was made: JSON values, for checkpoints."""
        return dict(self.bundle.facts)

    @property
    def unigram_entropy(self) -> dict[str, float]:
        return {name: of_set.unigram_entropy for name, of_set in self.statistics.items()}

    @property
    def source_tokens(self) -> dict[str, int]:
        """The number of tokens of each source; of more than 64, only the largest 64."""
        sizes = {name: source.stream.num_tokens for name, source in self.loader.sources.items()}
        return dict(sorted(sizes.items(), key=lambda item: -item[1])[:64])

    def summary(self) -> list[str]:
        lines = [self.bundle.summary()]
        if unused := [name for name in self.bundle.train if name not in self.loader.sources]:
            lines.append(f"warning: no phase draws from data.sources.{', '.join(unused[:8])}")
        epochs = {use.source: use.epochs_done for _, uses in self.planned_use() for use in uses}
        if epochs:
            shown = [f"{name} {count:,.3g}" for name, count in list(epochs.items())[:24]]
            lines.append(f"epochs by the end: {', '.join(shown)}")
        if many := [name for name, count in epochs.items() if count > _MANY_EPOCHS]:
            lines.append(
                f"warning: the run repeats data.sources.{', '.join(many[:8])} more than {_MANY_EPOCHS} times, from "
                "which models learn less and less; add text, or lower their weights or train.steps"
            )
        return lines

    def bits_per_byte(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Held-out losses, given by set in nats per token, as bits per byte; without sets whose bytes are unknown."""
        bits = {name: self.statistics[name].bits_per_byte(loss) for name, loss in losses.items()}
        return {name: value for name, value in bits.items() if value is not None}

    def epochs(self, step: int) -> dict[str, float]:
        """How many epochs over each source the steps [0, step) make, without sources that have no sample; of more than
        64 sources, only the 64 with the most epochs."""
        taken, sources = self.phases.counts(self.phases.samples_before(step)), self.loader.sources
        epochs = {name: sources[name].epochs(count) for name, count in taken.items() if name in sources}
        if len(epochs) > 64:
            return dict(sorted(epochs.items(), key=lambda item: -item[1])[:64])
        return epochs

    def planned_use(self) -> list[tuple[PhaseSpan, list[PlannedUse]]]:
        """What each phase takes from each of its sources, exact to one sample."""
        taken: dict[str, int] = {}
        plan = []
        for span in self.phases.spans:
            uses = []
            for name, weight in zip(span.blend.names, span.blend.shares, strict=True):
                before, share = taken.get(name, 0), weight / span.blend.period
                # Rounded, because the exact number of a blend with a long period takes long to compute.
                taken[name] = before + round(span.num_samples * share)
                source = self.loader.sources.get(name)  # may be missing with checkpoint.allow_mismatch
                if span.num_samples and source is not None:
                    began, done = source.epochs(before), source.epochs(taken[name])
                    uses.append(PlannedUse(name, share, done - began, done))
            plan.append((span, uses))
        return plan

    def check_epochs(self, limit: float | Mapping[str, float] | None) -> None:
        """Raise ValueError if the run would make more epochs over a source than `limit` (`data.max_epochs`)."""
        if limit is None:
            return
        sources = self.loader.sources
        limits = limit if isinstance(limit, Mapping) else dict.fromkeys(sources, limit)
        if unknown := [name for name in limits if name not in sources]:
            raise ValueError(f"data.max_epochs names {unknown[0]}, from which no phase draws: {', '.join(sources)}")
        epochs = {use.source: use.epochs_done for _, uses in self.planned_use() for use in uses}
        found = [
            f"{name} ({sources[name].stream.num_tokens:,} tokens) {epochs[name]:.3g} times (limit {most:g})"
            for name, most in limits.items()
            if epochs.get(name, 0.0) > most + 1 / sources[name].num_samples
        ]
        if found:
            raise ValueError(
                f"the run would go through {'; '.join(found)}: lower their weights in data.phases or train.steps, add "
                "text, or raise data.max_epochs"
            )


def check_kind(data: Any) -> None:
    """Raise ValueError for a group `data` with an unknown kind, or with settings that do not fit its kind."""
    if data.kind not in KINDS:
        raise ValueError(f"data.kind={data.kind} is not known; choose one of {', '.join(KINDS)}")
    KINDS[data.kind].check(data)
    check_megatron(data)


def phases(config: Any, num_tokens: Mapping[str, int] | None = None) -> PhaseSchedule:
    """The schedule of the phases. num_tokens: of each source, for blends by tokens; None before the data is opened:
    such blends then get one placeholder source. Raises ValueError for invalid phases."""
    train = config.train
    found = [
        Phase(
            **{key: getattr(phase, key) for key in _PHASE_KEYS},
            blend=phase.blend if isinstance(phase.blend, dict) else num_tokens or {"any": 1},
            by_tokens=phase.blend == "tokens",
        )
        for phase in config.data.phases
    ]
    length = train.steps, train.global_batch_size, train.sequence_length
    if config.data.order == "megatron":
        return MegatronSchedule(found, *length, config.data.megatron)
    return PhaseSchedule(found, *length)


def open_data(config: Any, mesh: Any, open_alike: Callable[..., Any]) -> RunData:
    """The data of a run, checked to be the same on all ranks by `open_alike` (training/build.py). A collective.

    Raises ValueError on all ranks for data that cannot be opened or does not fit, and for unknown token ids held out.
    """

    def opened() -> tuple[RunData, list[torch.Tensor]]:
        run = open_on_rank(config, mesh)
        # Each rank counts the targets of its share of the windows.
        return run, [held_out.target_counts(mesh.batch.rank, mesh.batch.size) for held_out in run.validation]

    run, shares = open_alike(opened, lambda found: _facts(found[0]))
    lengths = None if run.bundle.tokenizer is None else run.bundle.tokenizer.byte_lengths()
    statistics = {}
    for held_out, share in zip(run.validation, shares, strict=True):
        counts = share.to(mesh.device)
        dist.all_reduce(counts, group=mesh.batch.group)
        statistics[held_out.name] = held_out.statistics(counts.cpu(), lengths)
    return replace(run, statistics=statistics)


def open_alone(config: Any) -> RunData:
    """The data of a run, for a single process that does not train."""
    alone = SimpleNamespace(rank=0, size=1)
    return open_on_rank(config, SimpleNamespace(batch=alone, consecutive=False, device=torch.device("cpu")))


def open_on_rank(config: Any, mesh: Any) -> RunData:
    """This rank's data of a run, without communication. Raises ValueError or OSError."""
    train, data = config.train, config.data
    bundle, validation = open_held_out(config)
    schedule = phases(config, {name: stream.num_tokens for name, stream in bundle.train.items()})
    sources: Mapping[str, Samples]
    cut = train.sequence_length, config.data_seed, config.model.vocab_size
    if isinstance(schedule, MegatronSchedule):
        sources = schedule.open(bundle.train, *cut, data.cache_dir)
    else:
        sources = {name: SampleSource(name, stream, *cut, data.order) for name, stream in bundle.train.items()}
    loader = MicroBatchLoader(
        schedule,
        sources,
        train.micro_batch_size,
        mesh.batch.rank,
        mesh.batch.size,
        data.num_workers,
        device=mesh.device,
        allow_other_data=config.checkpoint.allow_mismatch,
        # Less than the timeout of collectives: the other ranks' errors would not name the worker.
        timeout_seconds=0.8 * config.parallel.timeout_seconds,
        masked=data.documents == "masked",
        boundary_loss=data.boundary_loss,
        consecutive=mesh.consecutive,
    )
    return RunData(bundle, loader, validation)


def open_held_out(config: Any) -> tuple[DataBundle, list[ValidationSet]]:
    """The opened sources, and their held-out windows. Raises ValueError or OSError."""
    data, length, samples = config.data, config.train.sequence_length, config.validation.num_samples
    bundle = KINDS[data.kind].open(data, config.model.vocab_size)
    if data.order == "megatron":
        bundle = replace(bundle, validation=held_out_by_split(bundle, data.megatron.split))
    options = config.model.vocab_size, data.documents == "masked", data.boundary_loss
    streams = bundle.validation.items()
    return bundle, [ValidationSet(name, stream, length, samples, *options) for name, stream in streams]


def _facts(run: RunData) -> dict[str, str]:
    """What must be equal on all ranks, by a name for it."""
    facts = {
        f"{key}.{name}": f"{stream.num_tokens} tokens ({stream.identity()})"
        for key, streams in (("data.sources", run.bundle.train), ("data.validation", run.bundle.validation))
        for name, stream in streams.items()
    }
    return {**facts, "data.tokenizer": str(run.fingerprint["tokenizer"])}
