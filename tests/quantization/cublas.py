"""What `torch.nn.functional.scaled_mm` computes of NVFP4 operands, in PyTorch on any device: it decodes its arguments.

The call itself is checked by PyTorch's own shape function, on tensors without data, and by what the CUDA function
demands beyond that (aten/src/ATen/native/cuda/ScaledBlas.cpp, 2.10 to 2.13).
"""

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    scale_a: list[Tensor],
    scale_recipe_a: list[ScalingType],
    scale_b: list[Tensor],
    scale_recipe_b: list[ScalingType],
    swizzle_a: list[SwizzleType],
    swizzle_b: list[SwizzleType],
    output_dtype: torch.dtype,
) -> Tensor:
    """a b in `output_dtype`, FP32 in between, with the keywords of the real one."""
    settings = {"scale_recipe_a": scale_recipe_a, "scale_recipe_b": scale_recipe_b}
    settings |= {"swizzle_a": swizzle_a, "swizzle_b": swizzle_b, "output_dtype": output_dtype}
    seen = functional.scaled_mm(
        mat_a.to("meta"),
        mat_b.to("meta"),
        scale_a=[scale.to("meta") for scale in scale_a],
        scale_b=[scale.to("meta") for scale in scale_b],
        **settings,
    )
    assert seen.shape == (mat_a.shape[0], mat_b.shape[1]) and seen.dtype == output_dtype
    assert output_dtype in (torch.bfloat16, torch.float32)
    for scales, recipe, swizzle in ((scale_a, scale_recipe_a, swizzle_a), (scale_b, scale_recipe_b, swizzle_b)):
        assert recipe == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        assert swizzle == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        assert scales[0].is_contiguous() and scales[0].device == mat_a.device == mat_b.device == scales[1].device
    for matrix in (mat_a, mat_b.t()):
        assert matrix.is_contiguous() and matrix.data_ptr() % 16 == 0 and matrix.shape[1] % 16 == 0
    product = decoded(mat_a, scale_a[0]) @ decoded(mat_b.t(), scale_b[0]).t()
    return product.mul_(scale_a[1] * scale_b[1]).to(output_dtype)


def decoded(codes: Tensor, swizzled: Tensor) -> Tensor:
    """FP32 code * block scale [rows, k] of packed codes [rows, k / 2] and their scales in cuBLAS's tiles."""
    packed = codes.view(torch.uint8).long()
    nibbles = torch.stack((packed % 16, packed // 16), -1).flatten(1)
    table = torch.tensor([*GRID, *(-value for value in GRID)], device=codes.device)
    rows, columns = nibbles.shape[0], nibbles.shape[1] // 16
    r, c = torch.arange(rows, device=codes.device)[:, None], torch.arange(columns, device=codes.device)[None, :]
    tiles = (r // 128) * -(-columns // 4) + c // 4
    scales = swizzled.float()[tiles * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4]
    return table[nibbles] * scales.repeat_interleave(16, 1)
