"""The data of a run from its configuration, as `pretrain.py` hands this module to the trainer.

Sources are opened by their kind, laid out in phases, and cut into a share for each rank. All ranks open the same data,
or none trains. `config` is the whole configuration, and `mesh` says which rank this is (`dp_rank`, `dp_size`,
`dp_group`, `consecutive`, `device`); this room knows neither's class. megatron_fp4/training/providers.py lists what a
trainer asks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from data.builtin import check_builtin, open_builtin
from data.indexed import DataBundle
from data.loader import MicroBatch, MicroBatchLoader
from data.megatron_order import MegatronSchedule, check_megatron, held_out_by_split
from data.order import Samples, SampleSource
from data.schedule import Phase, PhaseSchedule, PhaseSpan, PlannedUse, check_epochs, check_phases, planned_use
from data.sources import check_indexed, open_indexed
from data.storage import default_cache_dir
from data.validation import ValidationSet, Yardstick, fewer_windows

__all__ = ["MicroBatch", "RunData", "check", "check_kind", "default_cache_dir", "open_alone", "open_data", "phases"]

_MOST_EPOCHS = 64


class Kind(NamedTuple):
    """Both get the group `data` of a configuration.

    open: also gets the ids of the model; FileNotFoundError or ValueError for what is missing or does not fit the model.
    check: before anything is opened, ValueError for settings that are missing or mean nothing to this kind.
    """

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


@dataclass(frozen=True)
class RunData:
    """The opened data of a run. yardsticks: what held-out losses are measured by, by set; none where one process alone
    opened it."""

    bundle: DataBundle
    loader: MicroBatchLoader
    validation: list[ValidationSet]
    yardsticks: dict[str, Yardstick] = field(default_factory=dict)

    @property
    def phases(self) -> PhaseSchedule:
        """The data phases; after a resume, with those of the past."""
        return self.loader.schedule

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What is the same in every start of a run: its tokenizer. Which data was consumed is in the loader's state."""
        return {"tokenizer": self.bundle.tokenizer and self.bundle.tokenizer.fingerprint()}

    @property
    def unigram_entropy(self) -> dict[str, float]:
        """Of each held-out set, in nats per token."""
        return {name: yardstick.unigram_entropy for name, yardstick in self.yardsticks.items()}

    def summary(self, num_samples: int | None) -> list[str]:
        """Lines that say what was opened. num_samples: held-out windows that were asked for."""
        unused = [name for name in self.bundle.train if name not in self.loader.sources]
        told = [f"warning: no phase draws from data.sources.{', '.join(unused[:8])}"] if unused else []
        return [self.bundle.summary(), *told, *fewer_windows(self.validation, num_samples)]

    def bits_per_byte(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Held-out losses in nats per token, by set, as bits per byte of text, where its bytes are known."""
        bits = {name: self.yardsticks[name].bits_per_byte(loss) for name, loss in losses.items()}
        return {name: value for name, value in bits.items() if value is not None}

    def epochs(self, step: int) -> dict[str, float]:
        """How often the steps [0, step) have gone through each source that gave any of their samples; of more than 64
        sources, those gone through most."""
        taken, sources = self.phases.counts(self.phases.samples_before(step)), self.loader.sources
        epochs = {name: sources[name].epochs(count) for name, count in taken.items() if name in sources}
        if len(epochs) <= _MOST_EPOCHS:
            return epochs
        return dict(sorted(epochs.items(), key=lambda item: -item[1])[:_MOST_EPOCHS])

    def planned_use(self) -> list[tuple[PhaseSpan, list[PlannedUse]]]:
        """For each phase, what it takes from each of its sources."""
        return planned_use(self.phases, self.loader.sources)

    def check_epochs(self, limit: Any) -> None:
        """Raise ValueError if the run would go through a source more often than `limit` (`data.max_epochs`)."""
        check_epochs(self.phases, self.loader.sources, limit)


def check_kind(data: Any) -> None:
    """Raise ValueError for a group `data` whose kind is not known, or whose settings do not go with it."""
    if data.kind not in KINDS:
        raise ValueError(f"data.kind={data.kind} is not known; choose one of {', '.join(KINDS)}")
    KINDS[data.kind].check(data)
    check_megatron(data)


def check(config: Any) -> None:
    """Raise ValueError for phases that cannot be, as far as the configuration tells."""
    check_phases(phases(config))


def phases(config: Any, num_tokens: Mapping[str, int] | None = None) -> PhaseSchedule:
    """The phases laid out. num_tokens: of each source, for blends by tokens; before any data is opened, these have one
    source.

    Raises ValueError for phases that do not fill the run or cannot be.
    """
    train = config.train
    found = [
        Phase(
            phase.name,
            phase.fraction,
            phase.blend if isinstance(phase.blend, dict) else num_tokens or {"any": 1},
            phase.steps,
            phase.tokens,
            phase.global_batch_size,
            phase.sequence_length,
            by_tokens=phase.blend == "tokens",
        )
        for phase in config.data.phases
    ]
    length = train.steps, train.global_batch_size, train.sequence_length
    if config.data.order == "megatron":
        return MegatronSchedule(found, *length, config.data.megatron)
    return PhaseSchedule(found, *length)


def open_data(config: Any, mesh: Any, is_refusal: Callable[[Exception], bool]) -> RunData:
    """The data of a run, the same on all ranks; a collective. is_refusal: whether an error is the user's to mend.

    Raises ValueError on all ranks for what cannot be opened or does not fit, and for token ids outside the model's
    vocabulary in held-out windows.
    """
    run = agreed(lambda: open_on_rank(config, mesh), _facts, is_refusal)
    # Each rank counts the targets of its share of the windows.
    shares = agreed(
        lambda: [held_out.target_counts(mesh.dp_rank, mesh.dp_size) for held_out in run.validation],
        lambda _: {},
        is_refusal,
    )
    lengths = None if run.bundle.tokenizer is None else run.bundle.tokenizer.byte_lengths()
    yardsticks = {}
    for held_out, share in zip(run.validation, shares, strict=True):
        counts = share.to(mesh.device)
        dist.all_reduce(counts, group=mesh.dp_group)
        yardsticks[held_out.name] = held_out.yardstick(counts.cpu(), lengths)
    return replace(run, yardsticks=yardsticks)


def open_alone(config: Any) -> RunData:
    """The data of a run as one process sees it that does not train."""
    return open_on_rank(config, SimpleNamespace(dp_rank=0, dp_size=1, consecutive=False, device=torch.device("cpu")))


def open_on_rank(config: Any, mesh: Any) -> RunData:
    """The data of a run, without a look at other ranks. Raises ValueError or OSError for what cannot be opened or does
    not fit."""
    train, data, vocab_size = config.train, config.data, config.model.vocab_size
    bundle = KINDS[data.kind].open(data, vocab_size)
    schedule = phases(config, {name: stream.num_tokens for name, stream in bundle.train.items()})
    sources: Mapping[str, Samples]
    cut = train.sequence_length, config.data_seed, vocab_size
    if isinstance(schedule, MegatronSchedule):
        sources = schedule.open(bundle.train, *cut, data.cache_dir)
        bundle = replace(bundle, validation=held_out_by_split(bundle, data.megatron.split))
    else:
        sources = {name: SampleSource(name, stream, *cut, data.order) for name, stream in bundle.train.items()}
    loader = MicroBatchLoader(
        schedule,
        sources,
        train.micro_batch_size,
        mesh.dp_rank,
        mesh.dp_size,
        data.num_workers,
        device=mesh.device,
        allow_other_data=config.checkpoint.allow_mismatch,
        # Before the other ranks give up in a collective, and not name the worker.
        timeout_seconds=0.8 * config.parallel.timeout_seconds,
        masked=data.documents == "masked",
        boundary_loss=data.boundary_loss,
        consecutive=mesh.consecutive,
    )
    return RunData(bundle, loader, _held_out_sets(config, bundle))


def open_held_out(config: Any) -> tuple[DataBundle, list[ValidationSet]]:
    """The held-out data alone, as `open_data` opens it, for who does not train.

    Raises ValueError or OSError for what cannot be opened or does not fit.
    """
    data = config.data
    bundle = KINDS[data.kind].open(data, config.model.vocab_size)
    if data.order == "megatron":
        bundle = replace(bundle, validation=held_out_by_split(bundle, data.megatron.split))
    return bundle, _held_out_sets(config, bundle)


def _held_out_sets(config: Any, bundle: DataBundle) -> list[ValidationSet]:
    data, length, samples = config.data, config.train.sequence_length, config.validation.num_samples
    options = config.model.vocab_size, data.documents == "masked", data.boundary_loss
    return [ValidationSet(name, stream, length, samples, *options) for name, stream in bundle.validation.items()]


def _facts(run: RunData) -> dict[str, dict[str, Any]]:
    """What has to be the same data on all ranks, by what it is: JSON values."""
    fingerprint = dict(run.loader.fingerprint)
    del fingerprint["sources"]
    facts = {
        f"{what} {name}": {"num_tokens": stream.num_tokens, "identity": stream.identity()}
        for what, streams in (("source", run.bundle.train), ("validation source", run.bundle.validation))
        for name, stream in streams.items()
    }
    return {**facts, "the tokenizer": run.fingerprint, "the configuration": fingerprint}


T = TypeVar("T")


class _Outcome(NamedTuple):
    """Of opening the data on one rank. error: why it could not; refused: that is the user's to mend; differences: what
    it has otherwise than rank 0."""

    host: str
    error: str | None
    refused: bool
    differences: str


def agreed(
    open_data: Callable[[], T],
    facts_of: Callable[[T], Mapping[str, Mapping[str, Any]]],
    is_refusal: Callable[[Exception], bool],
) -> T:
    """What `open_data` gives on this rank, once it has given all ranks the same; a collective.

    A rank without a file, or with another version of it on its own disk, would otherwise be met in the first collective
    of training (a hang), or, with other data, not at all. facts_of: what must be equal, as facts (JSON values) by what
    they are of, such as a source's name. is_refusal: which exceptions mean that the user has something to mend.

    Raises, on all ranks alike, ValueError if ranks were refused or their facts differ from rank 0's, naming rank, host
    and reason; any other exception passes on the rank that met it and is a RuntimeError on the others.
    """
    facts: Mapping[str, Mapping[str, Any]] | None = None
    failure: Exception | None = None
    try:
        data = open_data()
        facts = facts_of(data)
    except Exception as error:
        failure = error
    box: list[Any] = [facts]
    dist.broadcast_object_list(box, src=0)
    different = "" if facts is None or box[0] is None else _differences(facts, box[0])
    refused = failure is not None and is_refusal(failure)
    mine = _Outcome(socket.gethostname(), None if failure is None else str(failure), refused, different)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, mine)
    if failed := [outcome for outcome in outcomes if outcome.error is not None]:
        if failure is not None and not refused:
            raise failure
        error_type = ValueError if all(outcome.refused for outcome in failed) else RuntimeError
        if len({outcome.error for outcome in outcomes}) == 1:
            raise error_type(outcomes[0].error) from failure
        told = _by_rank(outcomes, [outcome.error or "" for outcome in outcomes])
        raise error_type(f"not all ranks can open their data: {told}") from failure
    if any(outcome.differences for outcome in outcomes):
        raise ValueError(
            f"the ranks have different data: {_by_rank(outcomes, [outcome.differences for outcome in outcomes])}. Copy "
            "the same files to every host, or name paths that mean the same everywhere"
        )
    return data


def _differences(facts: Mapping[str, Mapping[str, Any]], rank_0: Mapping[str, Mapping[str, Any]]) -> str:
    found = []
    for name in dict.fromkeys((*rank_0, *facts)):
        here, there = facts.get(name, {}), rank_0.get(name, {})
        if keys := [key for key in dict.fromkeys((*there, *here)) if here.get(key) != there.get(key)]:
            ours, theirs = (", ".join(f"{key} {str(of.get(key))[:80]}" for key in keys) for of in (here, there))
            found.append(f"{name} with {ours}, rank 0 with {theirs}")
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def _by_rank(outcomes: Sequence[_Outcome], said: Sequence[str]) -> str:
    """What ranks said, each once with the ranks that said it; no more than three."""
    told = []
    for words in [words for words in dict.fromkeys(said) if words][:3]:
        ranks = [rank for rank, own in enumerate(said) if own == words]
        hosts = ", ".join(dict.fromkeys(outcomes[rank].host for rank in ranks[:8]))
        named = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        told.append(f"rank{'s' * (len(ranks) > 1)} {named} of {len(outcomes)} (host {hosts}): {words}")
    return "; ".join(told)
