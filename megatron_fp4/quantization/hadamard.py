"""Random Hadamard transforms (paper, section 4.2 and appendix C).

    x' = (x * s) H / sqrt(size)        on tiles of `size` elements along the last dimension

H is Sylvester's Hadamard matrix (entries +-1, symmetric), s a vector of signs. H / sqrt(size) is orthogonal: if both
operands of a GEMM are transformed along the dot product, the product is unchanged. Outliers are spread over their tile.

The sum over a tile is computed in FP32 by the butterflies of the fast transform, in one fixed order, so that CPU, GPU
and all shapes give the same bits. If 1 / sqrt(size) is a power of two, it is applied before the sums, with the signs:
that is exact, and sums cannot overflow. For BF16 input each output is rounded once, as in Transformer Engine, whose
kernel multiplies in BF16 and accumulates in FP32. (For 16 BF16 values of similar size the FP32 sum is exact.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_fp4.quantization.rounding import RoundingKey, random_bits

HADAMARD_SIZES = (2, 4, 8, 16, 32, 64, 128)

# The signs for all layers and steps; sign i is minus if bit i is set. The lowest 16 bits are Transformer Engine's
# (0xD7E8), the others were drawn once. A transform of size n uses the lowest n bits.
FIXED_SIGNS = 0xD2CB698E823CE4903FC9A9133115D7E8


def fixed_signs(size: int, device: torch.device | str = "cpu") -> Tensor:
    """FP32 [size] of +-1, always the same. Raises ValueError for a size that is not a power of two in 2..128."""
    _check_size(size)
    return torch.tensor([-1.0 if FIXED_SIGNS >> i & 1 else 1.0 for i in range(size)], device=device)


def random_signs(size: int, key: RoundingKey, device: torch.device | str = "cpu") -> Tensor:
    """FP32 [size] of +-1 drawn from `key` (paper E.4.3: one seed per instance). Raises ValueError as `fixed_signs`."""
    _check_size(size)
    bits = random_bits(key, 1, size, device)[0]
    return 1.0 - 2.0 * ((bits >> 16) & 1).to(torch.float32)


def random_hadamard_transform(x: Tensor, size: int = 16, signs: Tensor | None = None) -> Tensor:
    """Transform tiles of `size` elements along the last dimension of `x` ([..., cols], floating point).

    signs: FP32 [size] of +-1; None: `fixed_signs(size)`. Returns a tensor of the shape and dtype of `x`; FP64 is
    computed in FP64, other dtypes in FP32 and rounded once. Raises ValueError if `size` is not a power of two in 2..128
    or does not divide the last dimension, or if `signs` has another shape.
    """
    _check_size(size)
    if x.shape[-1] % size != 0:
        raise ValueError(
            f"random_hadamard_transform: the last dimension {x.shape[-1]} is not a multiple of the transform size "
            f"{size}; choose one of {[s for s in HADAMARD_SIZES if x.shape[-1] % s == 0]}"
        )
    if signs is None:
        signs = fixed_signs(size, x.device)
    elif signs.shape != (size,):
        raise ValueError(f"random_hadamard_transform: signs has shape {tuple(signs.shape)}, expected ({size},)")
    compute_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    factor = 1.0 / math.sqrt(size)
    exact = math.frexp(factor)[0] == 0.5
    tiles = x.to(compute_dtype).unflatten(-1, (-1, size)) * (signs.to(compute_dtype) * (factor if exact else 1.0))
    stride = 1
    while stride < size:
        low, high = tiles.unflatten(-1, (size // (2 * stride), 2, stride)).unbind(-2)
        if tiles.requires_grad:
            sums = torch.stack((low + high, low - high), dim=-2)
        else:  # `out` halves the memory traffic, but autograd does not support it
            sums = torch.empty_like(tiles).unflatten(-1, (size // (2 * stride), 2, stride))
            torch.add(low, high, out=sums[..., 0, :])
            torch.sub(low, high, out=sums[..., 1, :])
        tiles = sums.flatten(-3)
        stride *= 2
    return (tiles if exact else tiles * factor).flatten(-2).to(x.dtype)


def _check_size(size: int) -> None:
    if size not in HADAMARD_SIZES:
        raise ValueError(f"Hadamard transform size {size} is not supported; choose one of {list(HADAMARD_SIZES)}")
