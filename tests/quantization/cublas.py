"""A substitute for `torch.nn.functional.scaled_mm` of NVFP4 and MXFP8 operands: it decodes them and multiplies in FP32.

PyTorch's own shape function checks the call, on meta tensors. The asserts check what the CUDA function requires beyond
that (aten/src/ATen/native/cuda/ScaledBlas.cpp, 2.10 to 2.13).
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK, SWIZZLED = ScalingType.BlockWise1x16, SwizzleType.SWIZZLE_32_4_4
# From the dtype of codes to the dtype of block scales, and the required recipes and swizzles of all scales.
REQUIRED = {
    torch.float4_e2m1fn_x2: (torch.float8_e4m3fn, [BLOCK, ScalingType.TensorWise], [SWIZZLED, SwizzleType.NO_SWIZZLE]),
    torch.float8_e4m3fn: (torch.float8_e8m0fnu, [ScalingType.BlockWise1x32], [SWIZZLED]),
}


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
    """a b, accumulated in FP32, in `output_dtype`. Takes the keywords of the real function."""
    settings = {"scale_recipe_a": scale_recipe_a, "scale_recipe_b": scale_recipe_b}
    settings |= {"swizzle_a": swizzle_a, "swizzle_b": swizzle_b, "output_dtype": output_dtype}
    on_meta = functional.scaled_mm(
        mat_a.to("meta"),
        mat_b.to("meta"),
        scale_a=[scale.to("meta") for scale in scale_a],
        scale_b=[scale.to("meta") for scale in scale_b],
        **settings,
    )
    assert on_meta.shape == (mat_a.shape[0], mat_b.shape[1]) and on_meta.dtype == output_dtype
    assert output_dtype in (torch.bfloat16, torch.float32)
    assert mat_a.dtype == mat_b.dtype
    scale_dtype, *required = REQUIRED[mat_a.dtype]
    for scales, *given in ((scale_a, scale_recipe_a, swizzle_a), (scale_b, scale_recipe_b, swizzle_b)):
        assert given == required and len(scales) == len(required[0]) and scales[0].dtype == scale_dtype
        assert scales[0].is_contiguous() and {t.device for t in (mat_a, mat_b, *scales)} == {mat_a.device}
    for matrix in (mat_a, mat_b.t()):
        assert matrix.is_contiguous() and matrix.data_ptr() % 16 == 0 and matrix.shape[1] % 16 == 0
    product = decoded(mat_a, scale_a[0]) @ decoded(mat_b.t(), scale_b[0]).t()
    for a, b in zip(scale_a[1:], scale_b[1:], strict=True):
        product.mul_(a * b)
    return product.to(output_dtype)


def decoded(codes: Tensor, swizzled: Tensor) -> Tensor:
    """FP32 `code * block scale` [rows, k] of E4M3 codes [rows, k] or packed E2M1 codes [rows, k / 2], with scales in
    cuBLAS's tiles."""
    block = 32 if codes.dtype == torch.float8_e4m3fn else 16
    values = codes.float() if block == 32 else _e2m1(codes)
    scale_bytes = swizzled.view(torch.uint8)[slots(values.shape[0], values.shape[1] // block, codes.device)]
    scales = scale_bytes.view(torch.float8_e4m3fn).float() if block == 16 else _powers_of_two(scale_bytes)
    return values * scales.repeat_interleave(block, 1)


def slots(rows: int, columns: int, device: torch.device | str = "cpu") -> Tensor:
    """The byte at which cuBLAS reads the scale of each row and column (the formula of its documentation)."""
    r, c = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None]
    return ((r // 128) * -(-columns // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


def _e2m1(codes: Tensor) -> Tensor:
    packed = codes.view(torch.uint8).long()
    nibbles = torch.stack((packed % 16, packed // 16), -1).flatten(1)
    return _grid(codes.device)[nibbles]


@functools.cache  # a CUDA graph cannot capture a copy from the host
def _grid(device: torch.device) -> Tensor:
    return torch.tensor([*GRID, *(-value for value in GRID)], device=device)


def _powers_of_two(codes: Tensor) -> Tensor:
    """FP32 values of UE8M0 codes; 255 is NaN."""
    return torch.exp2(codes.double() - 127).masked_fill(codes == 255, float("nan")).float()
