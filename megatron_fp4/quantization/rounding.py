"""Random draws as a pure function of who asks and where the element lies.

Stochastic rounding must give the same codes after a restart, at any mesh, on CPU and on GPU. A stateful generator
cannot do that; a counter-based one can. A draw here depends on

    a 64-bit key:  run seed, step, global micro-batch index, name of the linear, name of the operand;
    a position:    row and column of the element in the *global* tensor.

The key is split in two 32-bit halves. Row and column are hashed separately (a few thousand hashes), and their
exclusive-or is mixed once more (`lowbias32`, Chris Wellons' two-multiplication finalizer, whose bias is near the
statistical minimum). Positions never overflow, whatever the tensor's size, and a rank that holds a shard needs only the
shard's offset.

For rounding, two elements share the 32 bits of one such mix: columns 2j and 2j + 1 take the low and the high half at
column j. A draw is an odd multiple of 2^-16, 15 random bits and a half of the last: so no value on the grid is moved,
and the probability of rounding up, a whole multiple of 2^-15, is itself rounded to nearest.

All arithmetic is modulo 2^32. PyTorch's int32 wraps in multiplication; its right shift is arithmetic, hence the masks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9
_MIX_A = 0x7FEB352D
_MIX_B = 0x846CA68B


@dataclass(frozen=True)
class RoundingKey:
    """Where the draws of one quantization come from.

    key: 64 bits, from `rounding_key`. row_offset, column_offset: position of the local tensor's first element in the
    global tensor, for tensors that are shards.
    device: the same 64 bits in device memory, int32 [4] on 16 bytes: low half, high half, 0, 0. Where it is given,
    draws are made from what it holds when they are made, not from `key`: a captured CUDA graph has fixed arguments, and
    reads a key that is written anew before each replay (precision/rng.py).
    """

    key: int
    row_offset: int = 0
    column_offset: int = 0
    device: Tensor | None = field(default=None, compare=False)


def rounding_key(*parts: int | str, row_offset: int = 0, column_offset: int = 0) -> RoundingKey:
    """The key of one quantization from its coordinates, for instance (seed, step, micro-batch, linear, operand)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return RoundingKey(int.from_bytes(digest, "little"), row_offset, column_offset)


def fresh_rounding_key() -> RoundingKey:
    """A key drawn from torch's default CPU generator, for callers that have no position in a run."""
    return RoundingKey(int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64)))


def random_bits(key: RoundingKey, num_rows: int, num_columns: int, device: torch.device | str) -> Tensor:
    """32 random bits for every element of a [num_rows, num_columns] tensor, as int32."""
    low: int | Tensor = key.key & 0xFFFFFFFF
    high: int | Tensor = key.key >> 32
    if key.device is not None:
        low, high = key.device[:2].to(torch.int64).bitwise_and_(0xFFFFFFFF).unbind()
    row_hash = _hash_positions(low, key.row_offset, num_rows, device)
    column_hash = _hash_positions(high, key.column_offset, num_columns, device)
    return _mix(row_hash[:, None] ^ column_hash[None, :])


def random_uniform(key: RoundingKey, num_rows: int, num_columns: int, device: torch.device | str) -> Tensor:
    """FP32 draws in [0, 1) with 22 bits each (the highest of `random_bits`), [num_rows, num_columns]."""
    bits = random_bits(key, num_rows, num_columns, device)
    return (bits >> 10).bitwise_and_(0x3FFFFF).to(torch.float32).mul_(2.0**-22)


def rounding_draws(key: RoundingKey, num_rows: int, num_columns: int, device: torch.device | str) -> Tensor:
    """FP32 draws for stochastic rounding, odd multiples of 2^-16 in (0, 1), [num_rows, num_columns].

    num_columns and the key's column offset are even (ValueError): columns come in pairs.
    """
    if num_columns % 2 or key.column_offset % 2:
        raise ValueError(
            f"rounding_draws: {num_columns} columns from column {key.column_offset} on; both must be even, because two "
            "columns share one hash"
        )
    pairs = replace(key, column_offset=key.column_offset // 2)
    bits = random_bits(pairs, num_rows, num_columns // 2, device)
    halves = torch.stack((bits & 0xFFFF, (bits >> 16) & 0xFFFF), dim=-1).flatten(-2)
    return halves.bitwise_or_(1).to(torch.float32).mul_(2.0**-16)


def _hash_positions(seed: int | Tensor, offset: int, count: int, device: torch.device | str) -> Tensor:
    position = torch.arange(offset, offset + count, dtype=torch.int64, device=device)
    hashed = (position * _GOLDEN + seed) & 0xFFFFFFFF
    return _mix(torch.where(hashed >= 2**31, hashed - 2**32, hashed).to(torch.int32))


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16).bitwise_and_(0xFFFF)
    x.mul_(_MIX_A)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x.mul_(_MIX_B - 2**32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x
