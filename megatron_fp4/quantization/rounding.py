"""Rounding to the element formats E2M1, E4M3 and UE8M0, to nearest and stochastically, and the random draws for it.

E2M1 has one sign bit, two exponent bits and one mantissa bit. The codes 0..7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6;
bit 3 is the sign. Two codes share a byte; the low nibble is the even element. Everything is elementwise, in plain
PyTorch, and gives the same bits on CPU and CUDA.

Stochastic rounding must give the same codes after a restart, on any mesh, on CPU and GPU. So draws do not come from a
generator with a state: a draw is a pure function (a hash) of

    a 64-bit key:  run seed, step, global micro-batch index, name of the linear, name of the operand;
    a position:    row and column of the element in the *global* tensor (`Place`).

The key is split into two 32-bit halves, one for rows and one for columns. Rows and columns are hashed separately (a few
thousand hashes), and the exclusive-or of an element's two hashes is mixed once more. The mixing function is
`lowbias32`, Chris Wellons' finalizer with two multiplications, whose bias is near the statistical minimum. A rank that
holds a part of a tensor needs to know only where its rows and columns lie in the whole. All arithmetic, that of
positions included, is modulo 2^32. PyTorch's right shift is arithmetic, so sign bits are masked out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_fp4.quantization.segments import Segments

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max

GOLDEN = 0x9E3779B9
_MIX_A = 0x7FEB352D
_MIX_B = 0x846CA68B


def e2m1_codes(values: Tensor, negative: Tensor) -> Tensor:
    """Codes (uint8, 0..15) of FP32 `values` that are on the E2M1 grid; NaN gets the code of 6.

    negative: bool, where the sign bit is set. It cannot be read from `values`, because `round_e2m1_nearest` loses the
    sign of zero, and a negative number that is rounded to zero keeps its sign in the code (8).
    """
    magnitude = values.abs()
    # The code of v is 2v below 2, v + 2 in [2, 4), and v/2 + 4 at 4 and 6.
    code = torch.where(magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude + 2, magnitude * 0.5 + 4))
    code = torch.nan_to_num(code, nan=7.0).to(torch.uint8)
    return code | (negative.to(torch.uint8) << 3)


def e2m1_values(codes: Tensor) -> Tensor:
    """FP32 values of uint8 E2M1 codes 0..15."""
    table = torch.tensor((*E2M1_VALUES, *(-v for v in E2M1_VALUES)), dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def pack_codes(codes: Tensor) -> Tensor:
    """Pack two codes into a byte along the last dimension: [..., cols] -> [..., cols / 2], low nibble = even column."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """The inverse of `pack_codes`: [..., cols / 2] -> [..., cols]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def round_e2m1_nearest(scaled: Tensor) -> Tensor:
    """FP32 |scaled| <= 6 rounded to the nearest E2M1 value, ties to the even code (.25 -> 0, .75 -> 1, 1.25 -> 1,
    1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4). All zeros in the result are positive.

    After adding 1.5 * 2^23 spacings, an FP32 mantissa has no bits below the spacing. So the addition itself rounds to
    nearest, ties to even multiples of the spacing, which are exactly the even codes.
    """
    anchor = _binade(scaled).mul_(0.5 * 1.5 * 2**23)
    return (scaled + anchor).sub_(anchor)


def round_e2m1_stochastic(scaled: Tensor, uniform: Tensor) -> Tensor:
    """FP32 |scaled| <= 6 rounded to one of the two adjacent E2M1 values: away from zero with probability
    (distance from the smaller magnitude) / spacing, otherwise towards zero.

    uniform: draws in [0, 1) of the shape of `scaled`, with at most 20 bits. Then a value on the grid stays unchanged,
    and all arithmetic but one addition is exact (the spacing is a power of two), so CPU and GPU round alike.
    """
    half_binade = _binade(scaled).mul_(0.5)
    magnitude = torch.floor((scaled.abs() / half_binade).add_(uniform)).mul_(half_binade)
    return torch.copysign(magnitude, scaled)


def _binade(scaled: Tensor) -> Tensor:
    """The largest power of two up to |scaled|, but at least 1: twice the spacing of the E2M1 grid there."""
    exponent = scaled.view(torch.int32) & 0x7F800000
    return exponent.view(torch.float32).clamp_(min=1.0)


def to_e4m3(values: Tensor) -> Tensor:
    """FP32 to `float8_e4m3fn`: rounded to nearest, ties to even, saturated at 448; NaN stays NaN."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def to_ue8m0_up(values: Tensor) -> Tensor:
    """UE8M0 codes (biased exponents, uint8) of non-negative FP32 `values` rounded **up** to a power of two.

    Code c stands for 2^(c - 127). Values up to 2^-127, zero included, get code 0; inf and NaN get 255 (NaN in UE8M0).
    """
    bits = values.view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    # Exponent field 0: the value is mantissa * 2^-149, so a mantissa of 0x400000 is 2^-127, the smallest scale.
    round_up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    code = torch.where(exponent == 255, exponent, exponent + round_up)
    return torch.where(torch.isfinite(values), code.clamp(max=254), torch.full_like(code, 255)).to(torch.uint8)


def ue8m0_values(codes: Tensor) -> Tensor:
    """FP32 powers of two of UE8M0 codes; 255 is NaN. Code 0 is 2^-127, a subnormal number in FP32."""
    exponent = codes.to(torch.int32)
    bits = torch.where(exponent == 0, torch.full_like(exponent, 0x400000), exponent << 23)
    return torch.where(exponent == 255, float("nan"), bits.view(torch.float32))


@dataclass(frozen=True)
class Span:
    """Which positions of a dimension of the global tensor are here, and who has the others.

    at: the first position, which the others follow; or, where they are not contiguous (a head-tail slice of a sequence,
        several sequences, the tokens of an expert), the position of each, int64 [n] on the tensor's device.
    ranks: those that hold the other positions; None: there are no others, or they do not matter.
    """

    at: int | Tensor = 0
    ranks: ProcessGroup | None = None

    def positions(self, count: int, device: torch.device | str) -> Tensor:
        """The positions of `count` rows or columns, int64 [count]."""
        if isinstance(self.at, int):
            return torch.arange(self.at, self.at + count, device=device)
        assert len(self.at) == count, f"{len(self.at)} positions of {count}"
        return self.at

    def blocks(self, size: int) -> Span:
        """The numbers of complete blocks of `size` positions; a block is known by its first position."""
        return Span(self.at // size if isinstance(self.at, int) else self.at[::size] // size, self.ranks)

    def part(self, part: slice) -> Span:
        return Span(self.at + part.start if isinstance(self.at, int) else self.at[part], self.ranks)


ALL = Span()
"""All positions of a dimension."""


@dataclass(frozen=True)
class Place:
    """Where a tensor [rows, columns] lies in the global tensor. Draws and maxima come from it, so that any partition
    into complete blocks has the codes of the whole.

    Rows that come from several micro-batches are numbered over all of these (micro-batch * tokens + token), and their
    key leaves the micro-batch out: so a row's draws depend on its own micro-batch, whichever rank has it.

    segments: the rows are several tensors, one after another. Neither they nor `rows` include the padding.
    """

    rows: Span = ALL
    columns: Span = ALL
    segments: Segments | None = None

    @property
    def amax_groups(self) -> tuple[ProcessGroup, ...]:
        """The groups over which the tensor's maximum is reduced, one after another; empty: all of it is here."""
        return tuple(span.ranks for span in (self.rows, self.columns) if span.ranks is not None)

    def t(self) -> Place:
        assert self.segments is None
        return Place(self.columns, self.rows)


WHOLE = Place()
"""The place of a tensor that is here as a whole."""


@dataclass(frozen=True)
class RoundingKey:
    """Key and place that determine the draws of one quantization.

    key: 64 bits, from `rounding_key`. place: of the operand [rows, k] that is quantized.
    device: the same 64 bits in device memory, int32 [4] aligned to 16 bytes: low half, high half, 0, 0. If it is given,
        draws use what it holds at that time, not `key`: the arguments of a captured CUDA graph are fixed, so the graph
        reads a key from memory, which is overwritten before each replay (precision/rng.py).
    graph_generator: returns the generator from which a captured CUDA graph draws at a place instead, seeded with `seed`
        before each replay; for backends that draw from generators.
    """

    key: int
    place: Place = WHOLE
    device: Tensor | None = field(default=None, compare=False)
    graph_generator: Callable[[Place], torch.Generator] | None = field(default=None, compare=False)

    def at(self, place: Place) -> RoundingKey:
        return replace(self, place=place)

    @property
    def seed(self) -> int:
        """63 bits from key and first position, for generators that know no positions."""
        first = self.place.rows.at, self.place.columns.at
        assert all(isinstance(at, int) for at in first), "a generator's draws cannot follow an index of positions"
        return rounding_key(self.key, *first).key >> 1  # type: ignore[arg-type]


def rounding_key(*parts: int | str) -> RoundingKey:
    """The key of the quantization with these coordinates, for instance (seed, step, micro-batch, linear, operand)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return RoundingKey(int.from_bytes(digest, "little"))


def fresh_rounding_key() -> RoundingKey:
    """A key drawn from torch's default CPU generator, for callers outside of a run."""
    return RoundingKey(int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64)))


def random_bits(key: RoundingKey, num_rows: int, num_columns: int, device: torch.device | str) -> Tensor:
    """32 random bits for each element, int32 [num_rows, num_columns]."""
    low: int | Tensor = key.key & 0xFFFFFFFF
    high: int | Tensor = key.key >> 32
    if key.device is not None:
        low, high = key.device[:2].to(torch.int64).bitwise_and_(0xFFFFFFFF).unbind()
    row_hash = _hash_positions(low, key.place.rows.positions(num_rows, device))
    column_hash = _hash_positions(high, key.place.columns.positions(num_columns, device))
    return _mix(row_hash[:, None] ^ column_hash[None, :])


def random_uniform(key: RoundingKey, num_rows: int, num_columns: int, device: torch.device | str) -> Tensor:
    """FP32 draws in [0, 1) with 22 bits (the highest of `random_bits`), [num_rows, num_columns]."""
    bits = random_bits(key, num_rows, num_columns, device)
    return (bits >> 10).bitwise_and_(0x3FFFFF).to(torch.float32).mul_(2.0**-22)


def rounding_draws(key: RoundingKey, num_rows: int, num_columns: int, device: torch.device | str) -> Tensor:
    """FP32 draws for stochastic rounding, odd multiples of 2^-16 in (0, 1), [num_rows, num_columns].

    Columns 2j and 2j + 1 use the low and the high half of one hash, that of column j; so columns that follow each other
    come in pairs, from an even position on. A draw is 15 random bits plus half a unit of the last. So values on the
    grid stay unchanged, and the probability of rounding up is the exact one, rounded to the nearest multiple of 2^-15.
    """
    columns = key.place.columns
    if isinstance(columns.at, int):
        assert num_columns % 2 == columns.at % 2 == 0, "columns come in pairs"
        bits = random_bits(key.at(Place(key.place.rows, columns.blocks(2))), num_rows, num_columns // 2, device)
        halves = torch.stack((bits & 0xFFFF, (bits >> 16) & 0xFFFF), dim=-1).flatten(-2)
    else:
        bits = random_bits(key.at(Place(key.place.rows, Span(columns.at // 2))), num_rows, num_columns, device)
        halves = torch.where(columns.at % 2 == 1, bits >> 16, bits).bitwise_and_(0xFFFF)
    return halves.bitwise_or_(1).to(torch.float32).mul_(2.0**-16)


def round_e2m1(scaled: Tensor, key: RoundingKey | None) -> Tensor:
    """FP32 |scaled| <= 6 [rows, cols] rounded to E2M1: stochastically by the draws of `key`, or to nearest if None."""
    if key is None:
        return round_e2m1_nearest(scaled)
    return round_e2m1_stochastic(scaled, rounding_draws(key, scaled.shape[0], scaled.shape[1], scaled.device))


def _hash_positions(seed: int | Tensor, position: Tensor) -> Tensor:
    hashed = (position * GOLDEN + seed) & 0xFFFFFFFF
    return _mix(torch.where(hashed >= 2**31, hashed - 2**32, hashed).to(torch.int32))


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16).bitwise_and_(0xFFFF)
    x.mul_(_MIX_A)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x.mul_(_MIX_B - 2**32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x
