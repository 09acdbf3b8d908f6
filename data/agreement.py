"""All ranks open the same data, or none trains.

A rank without a file, with another version of it on its own disk, or in another working directory, would otherwise be
met in the first collective of training (a hang), or, with other data, by nobody.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

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
