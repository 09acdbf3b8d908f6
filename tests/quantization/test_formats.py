"""The table of formats, and the arguments of every kernel launch against the kernels' signatures."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp4.planning.dry_run import AllocatingGPU, planned_gpu
from megatron_fp4.precision.backend import OperandRequest, RowGroups
from megatron_fp4.precision.emulated import EMULATED, packed_weight, quantize_operand, side_of
from megatron_fp4.precision.grouped_gemm import multiply_rows, multiply_weights
from megatron_fp4.precision.recipe import Operand
from megatron_fp4.precision.sums import blackwell_product
from megatron_fp4.precision.torch_scaled_mm import FORMATS as SCALED_MM_FORMATS
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.cuda import Kernel
from megatron_fp4.quantization.formats import FORMATS
from megatron_fp4.quantization.rounding import WHOLE, rounding_key
from megatron_fp4.quantization.segments import Segments
from tests.quantization.partitions import CASES, check_parts

KERNELS = Path(cuda.__file__).parent / "kernels"
ALONG = ("columns", "rows")
KEY = rounding_key("draws")
OPTION_VALUES = {"four_over_six": ("absolute", "squared"), "power_of_two_scales": (True,)}


def operands() -> Iterator[Operand]:
    """All operands that the table allows; of the family, which has no kernels, one along a row and one in squares."""
    for name, form in FORMATS.items():
        for block in form.blocks if form.fused or len(form.blocks) == 1 else form.blocks[1:7:5]:
            for rounding in ("nearest", "stochastic") if form.stochastic else ("nearest",):
                yield Operand(name, block, rounding)
                for option in form.options:
                    yield from (Operand(name, block, rounding, **{option: value}) for value in OPTION_VALUES[option])
        if form.encode_ms_eden is not None:
            yield Operand(name, form.blocks[0], "ms_eden")


@pytest.mark.parametrize("operand", operands(), ids=str)
def test_each_format_describes_what_its_encoder_returns(operand: Operand) -> None:
    form, x = FORMATS[operand.format], torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    key = KEY if operand.drawn else None
    encoded = operand.encode(x, key)
    assert encoded.block == operand.block
    num_scales = 256 if form.scope == "column" else 256 // operand.block[1] if len(form.blocks) > 1 else 1
    assert encoded.scales.shape == (256, num_scales)
    assert encoded.scales.dtype == (torch.uint8 if form.scales == torch.float8_e8m0fnu else form.scales)
    assert (encoded.decode_scale() is not None) == form.tensor_scale
    assert form.largest / 2 < encoded.elements.float().abs().max() <= form.largest
    values = encoded.block_values()
    assert torch.equal(values.to(encoded.exact).float(), values)
    assert form.exact == (encoded.exact == torch.bfloat16) or operand.power_of_two_scales
    reshaped = encoded.reshaped((2, 128))
    assert reshaped.shape == (2, 128, 256) and torch.equal(reshaped.block_values().flatten(0, 1), values)
    # The operand of a GEMM has the same values.
    gemm_operand = quantize_operand(x, WHOLE, OperandRequest(operand, key=KEY, dtype=torch.float32)).unpacked()
    assert torch.equal(gemm_operand.float(), values) and gemm_operand.dtype == encoded.exact


@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_codes_of_the_whole(name: str) -> None:
    check_parts(CASES[name], "cpu")


def signatures() -> dict[str, tuple[list[str], list[str]]]:
    """From kernels to their run-time arguments and constants, from the source, because Triton may not be installed."""
    found = {}
    for path in KERNELS.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                constants = [arg.arg for arg in node.args.args if arg.annotation is not None]
                arguments = [arg.arg for arg in node.args.args if arg.annotation is None]
                assert [arg.arg for arg in node.args.args] == arguments + constants, "constants come last"
                found[f"{path.stem}.{node.name}"] = arguments, constants
    return found


@contextmanager
def launches() -> Iterator[list[tuple[Kernel, tuple[Any, ...], dict[str, Any]]]]:
    """Run code as on a GPU, on fake tensors. Yields what would have started: kernels, their arguments and constants."""
    started: list[tuple[Kernel, tuple[Any, ...], dict[str, Any]]] = []
    with FakeTensorMode(), planned_gpu(), mock.patch.object(AllocatingGPU, "start") as start:
        start.side_effect = lambda kernel, _, arguments, constants: started.append((kernel, arguments, constants))
        yield started


def test_the_arguments_of_every_launch_match_its_kernel() -> None:
    known, seen = signatures(), set[Kernel]()
    with launches() as started:
        x = torch.empty(128, 128, dtype=torch.bfloat16)
        for operand in operands():
            kernels, ms_eden = FORMATS[operand.format].kernels, operand.rounding == "ms_eden"
            for rht in (0, 128 if ms_eden else operand.block[1]):
                key = KEY if operand.drawn else None
                request = OperandRequest(operand, rht, "fresh" if ms_eden else "fixed", key, KEY)
                requests = [request if kernels(side_of(request), along) else None for along in ALONG]
                for keep in (False, True):
                    makers = EMULATED.operands(x, WHOLE, *(each and replace(each, keep=keep) for each in requests))
                    gemm_operands = [maker() for maker in makers if maker is not None]
                    assert all(each.unpacked().shape == (128, 128) for each in gemm_operands)
                    if len(gemm_operands) == 2:
                        EMULATED.gemm(*gemm_operands, x.dtype)
                if operand.format in SCALED_MM_FORMATS:
                    for maker in TorchBackend().operands(x, WHOLE, *requests):
                        if maker is not None:
                            maker()
        for name in ("nvfp4", "mxfp4"):
            request = OperandRequest(Operand(name, FORMATS[name].blocks[1]))
            assert packed_weight(x, WHOLE, request, RowGroups(128, 128)).unpacked().shape == (128, 128)
        segments = Segments.of_equal(64, 2, x.device).padded_to(16)
        multiply_rows(x, x, None, None, segments, x.dtype, per_expert=(64, 128))
        multiply_weights(x.t(), x.t(), None, None, segments, None)
        blackwell_product(x, x, torch.empty(()), x.dtype)
        for kernel, arguments, constants in started:
            parameters, constant_names = known[kernel.name]
            assert len(arguments) == len(parameters), kernel
            assert constants.keys() == set(constant_names), kernel
            if kernel.types is not None:
                assert list(constants) == constant_names and len(arguments) == len(kernel.types), kernel
            seen.add(kernel)
        # How each kernel is compiled: its numbers depend on fusion, its speed on warps.
        assert {kernel.name for kernel in seen if kernel.enable_fp_fusion} == {"fp8.matmul_fp8_kernel"}
        warps = {kernel.name: kernel.num_warps for kernel in seen if kernel.num_warps != 4}
        assert warps == {"fp4.quantize_rows_kernel": 2, "fp8.quantize_kernel": 8, "grouped_gemm.rows_kernel": 8}
        assert {kernel.name for kernel in seen if kernel.types is not None} == {
            *(f"fp4.{name}_kernel" for name in ("measure", "quantize_columns", "quantize_rows", "unpack")),
            *(f"square_blocks.{name}_kernel" for name in ("maxima", "quantize", "unpack")),
        }
    assert {kernel.name for kernel in seen} == known.keys()
