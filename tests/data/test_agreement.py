"""Ranks that do not have the same data do not train; the message names the ranks and their data."""

import errno
import socket
from typing import Any

from data.provider import open_on_all_ranks
from megatron_fp4.training.build import is_refusal
from tests.training.harness import launch

HOST = socket.gethostname()
# The data of each rank, the error that all ranks raise, and words of its message.
CASES = [
    (["a", "a", "a"], "", []),
    (["a", "missing", "a"], "ValueError", ["3 ranks do not have", "rank 1 (host {host}): /d/missing.idx"]),
    (["missing1", "missing2", "missing1"], "ValueError", ["rank 0 (host {host}), rank 2 (host {host}): /d/missing1"]),
    (["missing"] * 3, "ValueError", []),
    (["a", "a", "bb"], "ValueError", ["rank 2 (host {host}): source web with num_tokens 2, rank 0 with 1"]),
    (["two", "abc", "two"], "ValueError", ["rank 1 (host {host}): source code with num_tokens None, rank 0"]),
    (["a", "broken disk", "missing"], "RuntimeError", ["rank 1 (", "Input/output error", "rank 2 ("]),
]  # fmt: skip


def _outcome(kind: str) -> tuple[str, str]:
    def open_data() -> str:
        if kind.startswith("missing"):
            raise FileNotFoundError(f"/d/{kind}.idx does not exist")
        if kind == "broken disk":
            raise OSError(errno.EIO, "Input/output error")
        return kind

    def facts(data: str) -> dict[str, dict[str, Any]]:
        web = {"source web": {"num_tokens": len(data)}}
        return {**web, "source code": {"num_tokens": 3}} if data == "two" else web

    try:
        return "", open_on_all_ranks(open_data, facts, is_refusal)
    except Exception as error:
        return type(error).__name__, str(error)


def _outcomes(rank: int) -> list[tuple[str, str]]:
    return [_outcome(case[rank]) for case, *_ in CASES]


def test_all_ranks_get_the_same_data_or_the_same_error() -> None:
    for (case, raised, words), *outcomes in zip(CASES, *launch(_outcomes, 3), strict=True):
        if "broken disk" in case:  # the rank with the broken disk raises its own error; a later start may succeed
            assert outcomes.pop(1) == ("OSError", "[Errno 5] Input/output error")
        assert len(set(outcomes)) == 1 and outcomes[0][0] == raised, (case, outcomes)
        told = outcomes[0][1]
        assert "\n" not in told and (told == "/d/missing.idx does not exist") == (case[0] == "missing")
        for word in words:
            assert word.format(host=HOST) in outcomes[0][1], outcomes[0]
