"""The data of a run from its configuration: opened by its kind, laid out in phases, cut into a share for each rank.

config is the whole configuration, and mesh what says which rank this is (`dp_rank`, `dp_size`, `dp_group`, `device`);
this room knows neither's class. All ranks open the same data, or none trains.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from data.builtin import check_builtin, open_builtin
from data.loader import MicroBatchLoader
from data.megatron_order import MegatronSchedule, check_megatron, held_out_by_split, megatron_run, open_megatron
from data.order import Samples, SampleSource
from data.schedule import Phase, PhaseSchedule
from data.sources import bytes_per_token, check_indexed, open_indexed
from data.token_source import DataBundle
from data.validation import ValidationSet, Yardstick


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


def check_kind(data: Any) -> None:
    """Raise ValueError for a group `data` whose kind nobody knows, or whose settings do not go with it."""
    if data.kind not in KINDS:
        raise ValueError(f"data.kind={data.kind} is not known; choose one of {', '.join(KINDS)}")
    KINDS[data.kind].check(data)
    check_megatron(data)


def phase_schedule(config: Any, num_tokens: Mapping[str, int]) -> PhaseSchedule:
    """The phases laid out. num_tokens: of each source, for blends by tokens; without any these have one source.

    Raises ValueError for phases that do not fill the run or cannot be.
    """
    train = config.train
    phases = [
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
        return MegatronSchedule(phases, *length, megatron_run(config.data))
    return PhaseSchedule(phases, *length)


def open_run_data(config: Any, mesh: Any) -> tuple[DataBundle, MicroBatchLoader, list[ValidationSet]]:
    """The data of a run: opened, laid out in phases, and cut into this rank's micro-batches and held-out windows.

    Raises ValueError or OSError for what cannot be opened or does not fit.
    """
    train, data, vocab_size = config.train, config.data, config.model.vocab_size
    masked = data.documents == "masked"
    bundle = KINDS[data.kind].open(data, vocab_size)
    phases = phase_schedule(config, {name: stream.num_tokens for name, stream in bundle.train.items()})
    sources: Mapping[str, Samples]
    cut = train.sequence_length, config.data_seed, vocab_size
    if isinstance(phases, MegatronSchedule):
        sources = open_megatron(phases, bundle.train, megatron_run(data), *cut, data.cache_dir).sources
        bundle = replace(bundle, validation=held_out_by_split(bundle, data.megatron.split))
    else:
        sources = {name: SampleSource(name, stream, *cut, data.order) for name, stream in bundle.train.items()}
    loader = MicroBatchLoader(
        phases,
        sources,
        train.micro_batch_size,
        mesh.dp_rank,
        mesh.dp_size,
        data.num_workers,
        device=mesh.device,
        allow_other_data=config.checkpoint.allow_mismatch,
        # Before the other ranks give up in a collective, and not name the worker.
        timeout_seconds=0.8 * config.parallel.timeout_seconds,
        masked=masked,
        boundary_loss=data.boundary_loss,
    )
    return bundle, loader, held_out_sets(config, bundle)


def open_held_out(config: Any) -> tuple[DataBundle, list[ValidationSet]]:
    """The held-out data alone, as `open_run_data` opens it, for who does not train.

    Raises ValueError or OSError for what cannot be opened or does not fit.
    """
    data = config.data
    bundle = KINDS[data.kind].open(data, config.model.vocab_size)
    if data.order == "megatron":
        bundle = replace(bundle, validation=held_out_by_split(bundle, data.megatron.split))
    return bundle, held_out_sets(config, bundle)


def held_out_sets(config: Any, bundle: DataBundle) -> list[ValidationSet]:
    """The run's held-out windows, set by set. bundle: with the held-out sources as the run has them."""
    return [
        ValidationSet(
            name,
            stream,
            config.train.sequence_length,
            config.validation.num_samples,
            config.model.vocab_size,
            masked=config.data.documents == "masked",
            boundary_loss=config.data.boundary_loss,
        )
        for name, stream in bundle.validation.items()
    ]


def yardsticks(
    validation: list[ValidationSet], bundle: DataBundle, mesh: Any, is_refusal: Callable[[Exception], bool]
) -> dict[str, Yardstick]:
    """What held-out losses are measured by, by set. A collective; each rank reads its share of the windows.

    Raises, on all ranks, ValueError for token ids outside the model's vocabulary, and what reading raises.
    """
    shares = agreed(
        lambda: [held_out.target_counts(mesh.dp_rank, mesh.dp_size) for held_out in validation],
        lambda _: {},
        is_refusal,
    )
    lengths = None if bundle.tokenizer is None else bundle.tokenizer.byte_lengths()
    found = {}
    for held_out, share in zip(validation, shares, strict=True):
        counts = share.to(mesh.device)
        dist.all_reduce(counts, group=mesh.dp_group)
        found[held_out.name] = Yardstick.of(counts.cpu(), lengths, bytes_per_token(held_out.stream))
    return found


def data_facts(opened: tuple[DataBundle, MicroBatchLoader, list[ValidationSet]]) -> dict[str, dict[str, Any]]:
    """What has to be the same data on all ranks, by what it is: JSON values."""
    bundle, loader, _ = opened
    fingerprint = dict(loader.fingerprint)
    del fingerprint["sources"]
    facts = {
        f"{what} {name}": {"num_tokens": stream.num_tokens, "identity": stream.identity()}
        for what, streams in (("source", bundle.train), ("validation source", bundle.validation))
        for name, stream in streams.items()
    }
    tokenizer = bundle.tokenizer and bundle.tokenizer.fingerprint()
    return {**facts, "a tokenizer": {"fingerprint": tokenizer}, "a configuration": fingerprint}


T = TypeVar("T")


class _Outcome(NamedTuple):
    """Of opening the data on one rank. failed: whether it could not; refused: that is the user's to mend; said: why
    not, or what it has otherwise than rank 0, "" if nothing."""

    host: str
    failed: bool
    refused: bool
    said: str


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
    facts: dict[str, dict[str, Any]] | None = None
    failure: Exception | None = None
    try:
        data = open_data()
        facts = {name: dict(values) for name, values in facts_of(data).items()}
    except Exception as error:
        failure = error
    box: list[Any] = [facts]
    dist.broadcast_object_list(box, src=0)
    refused = failure is not None and is_refusal(failure)
    said = str(failure) if facts is None else _differences(facts, box[0] or facts)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _Outcome(socket.gethostname(), failure is not None, refused, said))
    if failed := [outcome for outcome in outcomes if outcome.failed]:
        if failure is not None and not refused:
            raise failure
        error_type = ValueError if all(outcome.refused for outcome in failed) else RuntimeError
        if len(failed) == len(outcomes) and len({outcome.said for outcome in outcomes}) == 1:
            raise error_type(outcomes[0].said) from failure
        told = _by_rank([o._replace(said=o.said if o.failed else "") for o in outcomes])
        raise error_type(f"not all ranks can open their data: {told}") from failure
    if any(outcome.said for outcome in outcomes):
        raise ValueError(
            f"the ranks have different data: {_by_rank(outcomes)}. Copy the same files to every host, or name paths "
            "that mean the same everywhere"
        )
    return data


def _differences(facts: Mapping[str, Mapping[str, Any]], model: Mapping[str, Mapping[str, Any]]) -> str:
    """What of `facts` is not as in `model`, rank 0's."""
    found = []
    for name in dict.fromkeys((*model, *facts)):
        here, there = facts.get(name), model.get(name)
        if here is None or there is None:
            found.append(f"no {name}, which rank 0 has" if here is None else f"{name}, which rank 0 has not")
        elif keys := [key for key in dict.fromkeys((*there, *here)) if here.get(key) != there.get(key)]:
            ours, theirs = (", ".join(f"{key} {str(of.get(key))[:80]}" for key in keys) for of in (here, there))
            found.append(f"{name} with {ours}, rank 0 with {theirs}")
    return ", ".join(found[:3]) + (f", and {len(found) - 3} more" if len(found) > 3 else "")


def _by_rank(outcomes: Sequence[_Outcome]) -> str:
    """What ranks said, each once with who said it; no more than three."""
    each: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.said:
            each.setdefault(outcome.said, []).append(rank)
    told = []
    for said, ranks in list(each.items())[:3]:
        hosts = ", ".join(dict.fromkeys(outcomes[rank].host for rank in ranks[:8]))
        named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        told.append(f"rank{'s' * (len(ranks) > 1)} {named} of {len(outcomes)} (host {hosts}): {said}")
    return "; ".join(told) + (f"; and {len(each) - 3} more" if len(each) > 3 else "")
