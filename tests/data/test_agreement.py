"""Ranks that do not have the same data do not train, and say whose is which."""

from __future__ import annotations

import errno
import socket
from typing import Any

from data.opening import agreed
from megatron_fp4.training.build import is_refusal
from tests.training.harness import launch

HOST = socket.gethostname()


def _outcomes(rank: int, cases: list[list[str]]) -> list[tuple[str, str]]:
    """For each case, what rank `rank` gets, whose data is of kind case[rank]."""
    return [_outcome(case[rank]) for case in cases]


def _outcome(kind: str) -> tuple[str, str]:
    def open_data() -> str:
        if kind.startswith("missing"):
            raise FileNotFoundError(f"/data/{kind}.idx does not exist")
        if kind == "broken disk":
            raise OSError(errno.EIO, "Input/output error")
        return kind

    def facts(data: str) -> dict[str, dict[str, Any]]:
        web = {"num_tokens": len(data), "identity": f"sha of {data}"}
        return {"source web": web} if data != "two" else {"source web": web, "source code": {"num_tokens": 3}}

    try:
        return "opened", agreed(open_data, facts, is_refusal)
    except Exception as error:
        return type(error).__name__, str(error)


REFUSED = [
    (
        ["a", "a", "missing", "a"],
        [
            "not all ranks can open",
            "rank 2 of 4 (host {host}): /data/missing.idx does not exist",
        ],
    ),
    (["missing", "b", "missing", "a"], ["ranks 0, 2 of 4 (host {host}): /data/missing.idx does not exist"]),
    (
        ["missing1", "a", "missing2", "a"],
        ["rank 0 of 4 (host {host}): /data/missing1.idx", "; rank 2 of 4 (host {host}): /data/missing2.idx"],
    ),
    (["missing"] * 4, ["/data/missing.idx does not exist"]),
    (
        ["a", "a", "a", "other"],
        [
            "rank 3 of 4 (host {host}): source web with num_tokens 5, identity sha of other, rank 0 with num_tokens 1, "
            "identity sha of a"
        ],
    ),
    (
        ["b", "a", "a", "a"],
        ["ranks 1, 2, 3 of 4 (host {host}): source web with identity sha of a, rank 0 with identity sha of b"],
    ),
    (["a", "two", "a", "two"], ["ranks 1, 3 of 4 (host {host}): source web", "source code, which rank 0 has not"]),
    (["two", "two", "two", "abc"], ["rank 3 of 4 (host {host}): source web", "no source code, which rank 0 has"]),
]


def test_all_ranks_refuse_with_one_message() -> None:
    cases = [case for case, _ in REFUSED]
    for (case, words), *outcomes in zip(REFUSED, *launch(_outcomes, 4, cases), strict=True):
        assert len(set(outcomes)) == 1, case
        kind, message = outcomes[0]
        assert kind == "ValueError" and "\n" not in message
        for word in words:
            assert word.format(host=HOST) in message, message


def test_the_same_data_is_opened_and_a_broken_disk_is_no_refusal() -> None:
    """It may be whole at the next start: a crash, on every rank."""
    outcomes = launch(_outcomes, 3, [["a", "a", "a"], ["a", "broken disk", "missing"]])
    assert [first for first, _ in outcomes] == [("opened", "a")] * 3
    crashes = [second for _, second in outcomes]
    assert crashes[1] == ("OSError", "[Errno 5] Input/output error")
    assert crashes[0] == crashes[2] and crashes[0][0] == "RuntimeError"
    assert "rank 1" in crashes[0][1] and "Input/output error" in crashes[0][1]
