"""Environment variables by which torchrun, or whoever else starts the ranks, tells a process which of them it is.

torch would read them deep inside: a traceback, a wait of minutes for ranks that do not exist, or another run than was
meant. So they are read here first, and refused in one line.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from megatron_fp4.config.schema import ConfigError

# More than any machine has; beyond it even listing what would divide them takes minutes.
_MOST_RANKS = 2**20


class Place(NamedTuple):
    """world_size: ranks of the run. rank, local_rank: of this process, in the run and on its machine; None if the
    environment does not say."""

    world_size: int
    rank: int | None
    local_rank: int | None


def place_in_run() -> Place:
    """What the environment says. Raises ConfigError for a value that is no number, or out of its range."""
    size = _integer("WORLD_SIZE", 1, _MOST_RANKS) or 1
    rank = _integer("RANK", 0, size - 1)
    local_size = _integer("LOCAL_WORLD_SIZE", 1, _MOST_RANKS) or _MOST_RANKS
    return Place(size, rank, _integer("LOCAL_RANK", 0, local_size - 1))


def check_launch() -> None:
    """Raise ConfigError unless this process can join the group of ranks that its environment describes, or be the only
    one."""
    place = place_in_run()
    if place.rank is None:
        if place.world_size > 1:
            raise ConfigError(
                f"WORLD_SIZE={place.world_size}, but RANK is not set, so this process would be all there is; start the "
                "run with torchrun, or unset WORLD_SIZE (for --check and run.dry=true it alone is right)"
            )
        return
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name, "").strip():
            raise ConfigError(
                f"RANK={place.rank} is set and {name} is not, so the ranks cannot meet; start the run with torchrun, "
                "which sets all of them, or unset RANK"
            )
    _integer("MASTER_PORT", 1, 65535)


def _integer(name: str, least: int, most: int) -> int | None:
    """The variable's value; None if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return None
    remedy = "start the run with torchrun, which sets it, or unset it"
    if not (text.strip().isdecimal() and text.isascii() and len(text) < 40):
        raise ConfigError(f"the environment variable {name}={text[:40]} is no whole number; {remedy}")
    if not least <= (value := int(text)) <= most:
        raise ConfigError(
            f"the environment variable {name}={text} is out of range: it lies between {least} and {most:,}; {remedy}"
        )
    return value
