"""The formats of the family against an independent implementation (oracle.py), and what holds for all of them."""

import numpy as np
import pytest
import torch

from megatron_fp4.quantization import Place, Span, quantize, rounding_key
from megatron_fp4.quantization.family import members
from megatron_fp4.quantization.formats import FORMATS
from megatron_fp4.quantization.rounding import rounding_draws
from tests.quantization import oracle
from tests.quantization.cases import close_in_fp32, tensors

MEMBERS = {member.name: member for member in members()}
EACH = pytest.mark.parametrize("name", MEMBERS)
INF, NAN = float("inf"), float("nan")
INEXACT = ("subnormal", "nearly_subnormal", "huge")  # the FP32 scale is subnormal, or a product overflows


def blocks_of(name: str) -> list[tuple[int, int]]:
    """Blocks of 16, or all sizes with the scales of Fig. 2 of arXiv 2505.19115."""
    every = MEMBERS[name].scale in ("e4m3", "e8m0") and MEMBERS[name].element == "e2m1"
    return [block for block in FORMATS[name].blocks if every or block[1] == 16]


@EACH
def test_codes_and_values_are_those_of_the_oracle(name: str) -> None:
    for case, x in tensors(128, 128, 3).items():
        for block in blocks_of(name) if case in ("gauss", "zero_blocks") else blocks_of(name)[-1:]:
            actual = quantize(torch.from_numpy(x), name, block)
            _, codes, values = oracle.family(x, name, block)
            assert np.array_equal(actual.elements.double().numpy(), codes), (case, block)
            assert close_in_fp32(actual.dequantize(), values) or case in INEXACT, (case, block)


@EACH
def test_stochastic_rounding_picks_a_neighbour_by_the_draw_for_the_position(name: str) -> None:
    x, key = tensors(32, 128)["student_t"], rounding_key("draws")
    actual = quantize(torch.from_numpy(x), name, blocks_of(name)[0], "stochastic", key=key)
    scaled, table = np.abs(oracle.family(x, name, blocks_of(name)[0])[0]), oracle.values_of(MEMBERS[name].element)
    below = np.searchsorted(table, scaled, side="right") - 1
    spacing = np.diff(table, append=2 * table[-1] - table[-2])[below]
    expected = np.floor((scaled / spacing).astype(np.float32) + rounding_draws(key, *x.shape, "cpu").numpy()) * spacing
    assert np.array_equal(np.copysign(expected, x), actual.elements.numpy())
    assert 0.3 < (expected > table[below])[scaled > table[below]].mean() < 0.7


@EACH
def test_powers_of_two_and_values_of_the_format_pass_through_and_parts_have_the_codes_of_the_whole(name: str) -> None:
    form, block = FORMATS[name], blocks_of(name)[0]
    x, key = torch.from_numpy(tensors(64, 256)["gauss"]), rounding_key(1)
    whole = quantize(x, name, block, "stochastic", key=key)
    if form.scope or MEMBERS[name].scale == "e8m0":
        assert torch.equal(quantize(x / 512, name, block).dequantize(), quantize(x, name, block).dequantize() / 512)
    if form.scope == "column":  # Smooth-SwiGLU's purpose: what channels are multiplied by changes no code
        by_channel = 2.0 ** torch.arange(-128, 128).clamp(-20, 20)
        smooth = quantize(x * by_channel, name, block).dequantize()
        assert torch.equal(smooth, quantize(x, name, block).dequantize() * by_channel)
    if not form.scope and MEMBERS[name].scale in ("e3m4", "e4m3", "e8m0"):
        once = quantize(x, name, block).dequantize()
        assert torch.equal(quantize(once, name, block).dequantize(), once)
    row, here = slice(32, None), {"tensor": (), "column": (slice(None), slice(128, None))}
    amax, here = form.amax(x), here | {"row": (row,), "128": (row, slice(1, None))}
    part = {} if amax is None else {"amax": amax[here[form.scope]]}
    found = quantize(x[32:, 128:], name, block, "stochastic", key=key.at(Place(Span(32), Span(128))), **part)
    assert torch.equal(found.dequantize(), whole.dequantize()[32:, 128:])


@EACH
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_non_finite_element_leaves_nothing_that_it_scales_finite(name: str, value: float) -> None:
    x, block, scope = torch.randn(32, 256), blocks_of(name)[0], FORMATS[name].scope
    x[3, 140] = value
    width = {"128": 128, "row": 256}.get(scope, block[1] if MEMBERS[name].scale else 1)
    expected = torch.full((32, 256), scope == "tensor")
    at = slice(140 // width * width, 140 // width * width + width)
    expected[3, at] = True
    if scope == "column":
        expected[:, at if value != value else 140] = True
    for rounding in ("nearest", "stochastic"):
        values = quantize(x, name, block, rounding, key=rounding_key(0)).dequantize()
        assert torch.equal(~values.isfinite(), expected)
    assert not quantize(torch.zeros(32, 256), name, block).dequantize().any()


@pytest.mark.parametrize(
    ("name", "established", "size"), [("e2m1_e4m3_tensor", "nvfp4", 16), ("e2m1_e8m0", "mxfp4", 32)]
)
def test_members_that_have_a_name_of_their_own_have_its_values(name: str, established: str, size: int) -> None:
    for case, x in tensors(32, 128).items():
        for block in ((1, size), (size, size)):
            for rounding in ("nearest", "stochastic"):
                ours, theirs = (
                    quantize(torch.from_numpy(x), n, block, rounding, key=rounding_key(2)) for n in (name, established)
                )
                assert torch.equal(ours.block_values(), theirs.block_values()), case
