"""The kinds of data, by the name that `data.kind` of a configuration gives them: one row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from data.builtin import check_builtin, open_builtin
from data.bundle import DataBundle
from data.fim_settings import check_fim
from data.indexed import check_indexed, open_indexed
from data.megatron_schedule import check_megatron


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
            vocab_size, data.sources, data.validation, data.tokenizer, data.eod_token, data.remote_cache
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
    check_fim(data)
