"""What the Triton kernels of attention take, and in which tiles they compute. Needs no Triton."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """queries, keys: of one tile. warps, stages: of a program, as Triton means them."""

    queries: int
    keys: int
    warps: int
    stages: int


class Kernels(NamedTuple):
    """The tiles of the three kernels. In `dkdv`, keys are a multiple of queries."""

    forward: Tiles
    dq: Tiles
    dkdv: Tiles


# What the Triton kernels take: one of these head dimensions, and as much memory for a program as Hopper's and
# Blackwell's data-center GPUs have. No timing decides between tiles, which decide the order of sums. Those for 128 are
# measured on an H200, the others follow FlexAttention's.
_SMALL = Kernels(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3))
KERNELS = {
    16: _SMALL,
    32: _SMALL,
    64: Kernels(Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
    128: Kernels(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)),
    256: Kernels(Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
}
HEAD_DIMS = tuple(KERNELS)
SHARED_MEMORY_KIB = 227
