"""The kinds of data, by the name that `data.kind` of a configuration gives them: one row each.

The data of a run from its configuration: opened, laid out in phases, cut into a share for each rank, agreed on.

config is the whole configuration, and mesh what says which rank this is (`dp_rank`, `dp_size`, `dp_group`, `device`);
this room knows neither's class.

All ranks open the same data, or none trains.

A rank without a file, with another version of it on its own disk, or in another working directory, would otherwise be
met in the first collective of training (a hang), or, with other data, by nobody.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
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
    """Of opening the data on one rank. error: why not, None if it was opened. refusal: that is the user's to mend."""

    host: str
    error: str | None = None
    refusal: bool = False
    digest: str = ""


def agreed(
    open_data: Callable[[], T],
    facts_of: Callable[[T], Mapping[str, Mapping[str, Any]]],
    is_refusal: Callable[[Exception], bool],
) -> T:
    """What `open_data` gives on this rank, once it has given all ranks the same; a collective.

    facts_of: what must be equal, as facts (JSON values) by what they are of, such as a source's name. is_refusal: which
    exceptions mean that the user has something to mend.

    Raises, on all ranks alike, ValueError if ranks were refused or their facts differ, naming rank, host and reason;
    any other exception passes on the rank that met it and is a RuntimeError on the others.
    """
    host, data, facts, failure = socket.gethostname(), None, None, None
    try:
        data = open_data()
        facts = {name: dict(values) for name, values in facts_of(data).items()}
        mine = _Outcome(host, digest=hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest())
    except Exception as error:
        failure, mine = error, _Outcome(host, f"{error}", is_refusal(error))
    outcomes: list[_Outcome] = _gathered(mine)
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.error is not None}
    if failed:
        if failure is not None and not mine.refusal:
            raise failure
        refused = all(outcome.refusal for outcome in failed.values())
        raise (ValueError if refused else RuntimeError)(_failures(failed, outcomes)) from failure
    assert data is not None and facts is not None
    if len({outcome.digest for outcome in outcomes}) > 1:
        raise ValueError(_differences(facts, outcomes))
    return data


def _failures(failed: Mapping[int, _Outcome], outcomes: Sequence[_Outcome]) -> str:
    errors = list(dict.fromkeys(str(outcome.error) for outcome in failed.values()))
    if len(failed) == len(outcomes) and len(errors) == 1:
        return errors[0]
    reasons = [
        f"{_named([rank for rank in failed if failed[rank].error == error], outcomes)}: {error}" for error in errors
    ]
    rest = len(outcomes) - len(failed)
    others = f"; the other {rest} of {len(outcomes)} ranks can" if rest else ""
    return f"not all ranks can open their data: {'; '.join(reasons[:3])}{others}"


def _differences(facts: Mapping[str, Mapping[str, Any]], outcomes: Sequence[_Outcome]) -> str:
    """A collective. Compared with the data that most ranks have, of equally many that of the lowest rank."""
    (common, _), *_ = Counter(outcome.digest for outcome in outcomes).most_common()
    model_rank = next(rank for rank, outcome in enumerate(outcomes) if outcome.digest == common)
    box: list[Any] = [facts]
    dist.broadcast_object_list(box, src=model_rank)
    model = box[0]
    others: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.digest != common:
            others.setdefault(outcome.digest, []).append(rank)
    speaks = dist.get_rank() in [ranks[0] for ranks in others.values()]
    said: list[str] = _gathered(_compared(facts, model, model_rank) if speaks else "")
    each = [
        f"{_named(ranks, outcomes)} {'has' if len(ranks) == 1 else 'have'} {said[ranks[0]]}"
        for ranks in others.values()
    ]
    more = f"; and {len(each) - 3} more" if len(each) > 3 else ""
    alike = sum(outcome.digest == common for outcome in outcomes)
    return (
        f"the ranks have different data: {'; '.join(each[:3])}{more} ({alike} of {len(outcomes)} ranks have what rank "
        f"{model_rank}, host {outcomes[model_rank].host}, has). Copy the same files to every host, or name paths that "
        "mean the same everywhere"
    )


def _compared(facts: Mapping[str, Mapping[str, Any]], model: Mapping[str, Mapping[str, Any]], model_rank: int) -> str:
    """What of `facts` is not as in `model`."""
    found = []
    for name in dict.fromkeys((*model, *facts)):
        here, there = facts.get(name), model.get(name)
        if here is None or there is None:
            found.append(
                f"{'no ' if here is None else ''}{name}, which rank {model_rank} has{'' if here is None else ' not'}"
            )
            continue
        keys = [key for key in dict.fromkeys((*there, *here)) if here.get(key) != there.get(key)]
        if keys:
            ours, theirs = (", ".join(f"{key} {_short(of.get(key))}" for key in keys) for of in (here, there))
            found.append(f"{name} with {ours}, rank {model_rank} with {theirs}")
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _named(ranks: Sequence[int], outcomes: Sequence[_Outcome]) -> str:
    """ "rank 3 (host b)", "ranks 3, 7 (hosts b, c)", no more than some of each."""
    hosts = list(dict.fromkeys(outcomes[rank].host for rank in ranks))
    return f"{_listed('rank', ranks)} ({_listed('host', hosts)})"


def _listed(what: str, items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:8])) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
    return f"{what}{'s' if len(items) > 1 else ''} {shown}"


def _gathered(mine: Any) -> list[Any]:
    """`mine` of every rank."""
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    return of_all
