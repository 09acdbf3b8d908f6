"""Ranks that do not have the same data do not train; the message names a rank and its data."""

import errno
import socket

from megatron_fp4.training.build import open_alike
from tests.training.harness import launch

HOST = socket.gethostname()
# The data of each rank, the error that all ranks raise, and its message.
CASES = [
    (["a", "a", "a"], "", ""),
    (
        ["a", "missing", "a"],
        "ValueError",
        f"1 of 3 ranks cannot be opened: rank 1 (host {HOST}): /d/missing does",
    ),
    (["none", "missing", "none"], "ValueError", "3 of 3 ranks cannot be opened: rank 0 (host"),
    (["missing"] * 3, "FileNotFoundError", "/d/missing does not exist"),
    (["a", "a", "bb"], "ConfigError", f"rank 2 ({HOST}) has data.sources.web=2 tokens, and rank 0 has 1 tokens. Copy"),
    (["two", "abc", "two"], "ConfigError", "data.sources.code=(absent), and rank 0 has 3 tokens"),
    (["a", "broken disk", "missing"], "RuntimeError", "2 of 3 ranks cannot be opened: rank 1"),
]


def _outcome(kind: str) -> tuple[str, str]:
    def open_data() -> str:
        if kind in ("missing", "none"):
            raise FileNotFoundError(f"/d/{kind} does not exist")
        if kind == "broken disk":
            raise OSError(errno.EIO, "Input/output error")
        return kind

    def facts(data: str) -> dict[str, str]:
        web = {"data.sources.web": f"{len(data)} tokens"}
        return {**web, "data.sources.code": "3 tokens"} if data == "two" else web

    try:
        return "", open_alike(open_data, facts)
    except Exception as error:
        return type(error).__name__, str(error)


def _outcomes(rank: int) -> list[tuple[str, str]]:
    return [_outcome(case[rank]) for case, *_ in CASES]


def test_all_ranks_get_the_same_data_or_the_same_error() -> None:
    for (case, raised, message), *outcomes in zip(CASES, *launch(_outcomes, 3), strict=True):
        if "broken disk" in case:  # the rank with the broken disk raises its own error; a later start may succeed
            assert outcomes.pop(1) == ("OSError", "[Errno 5] Input/output error")
        for rank, (kind, told) in enumerate(outcomes):
            assert (kind, told) == outcomes[0] if raised else told == case[rank]
            assert kind == raised and message in told, (case, outcomes)
