"""With the same input and output gradient, a linear has the same codes at every tensor-parallel size."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.layers import ColumnParallelLinear, PackedLinear, QuantizedLinear, RowParallelLinear
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from megatron_fp4.precision import emulated, messages, operands, torch_scaled_mm
from megatron_fp4.precision.backend import Backend, OperandRequest
from megatron_fp4.precision.emulated import GemmOperand, quantize_operand
from megatron_fp4.precision.operands import LinearCall
from megatron_fp4.precision.recipe import Recipe, rounded_to_nearest
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.torch_scaled_mm import TorchBackend
from megatron_fp4.precision.transformer_engine import TransformerEngineBackend
from megatron_fp4.quantization import cuda
from megatron_fp4.quantization.formats import FORMATS
from megatron_fp4.quantization.rounding import WHOLE
from tests.distributed.hybrid import NVFP4, RECIPES, operand, watched_gemms, whole
from tests.precision import te_stand_in
from tests.quantization import cublas, kernel_layout
from tests.training.harness import launch

pytestmark = pytest.mark.slow

TOKENS, IN, GROUPS, GROUP_ROWS = 128, 256, 8, 18
GEMMS = ("fprop", "dgrad", "wgrad")
GATHER, SCATTER = "_all_gather", "_reduce_scatter"
Message = tuple[str, int]

# Eight groups of 18 rows, which is not a multiple of 16, like the 12B model's in_proj (8 groups of 2836 rows).
LINEARS: dict[str, Callable[[ParallelMesh], QuantizedLinear]] = {
    "grouped": lambda mesh: ColumnParallelLinear(IN, GROUPS * GROUP_ROWS, mesh, num_groups=GROUPS),
    "column": lambda mesh: ColumnParallelLinear(IN, 256, mesh),
    "row": lambda mesh: RowParallelLinear(IN, 48, mesh),
}
SECTIONS = (("z", 8), ("x", 6), ("dt", 4))
OUTPUTS = {"grouped": GROUPS * GROUP_ROWS, "packed": GROUPS * GROUP_ROWS, "column": 256, "row": 48}
# The sharded dimension of both operands of each GEMM: fprop's x [tokens, in] and W [out, in], dgrad's dy [tokens, out]
# and W^T [in, out], wgrad's dy^T [out, tokens] and x^T [in, tokens]. None: every rank has the whole operand.
COLUMN_SHARDS: dict[str, tuple[int | None, int | None]] = {"fprop": (None, 0), "dgrad": (1, 1), "wgrad": (0, None)}
ROW_SHARDS: dict[str, tuple[int | None, int | None]] = {"fprop": (1, 1), "dgrad": (None, 0), "wgrad": (None, 0)}


def tensors(name: str, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, in], W [out, in], dy [tokens, out], with a trend along a dimension: shards have unequal maxima."""
    generator = torch.Generator().manual_seed(len(name))
    out = OUTPUTS[name]
    shapes = ((tokens, IN), (out, IN), (tokens, out))
    x, w, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    return x * torch.linspace(1, 9, IN), w * torch.linspace(5, 1, out)[:, None], dy * torch.linspace(1, 4, out)


def run(rank: int, tensor: int, precision: str, sequence: bool, **settings: Any) -> dict[str, dict[str, Any]]:
    mesh = build_mesh(ParallelConfig(tensor=tensor, sequence=sequence and tensor > 1), torch.device("cpu"))
    return calls_on(mesh, RECIPES[precision], **settings)


def calls_on(
    mesh: ParallelMesh, recipe: Recipe, dtype: torch.dtype = torch.float32, tokens: int = TOKENS, keeps: bool = False
) -> dict[str, dict[str, Any]]:
    """For every linear the operands of its three GEMMs on this rank, y, dx, and the whole dW."""
    found: dict[str, dict[str, Any]] = {}
    for name in LINEARS:
        linear, x, dy = linear_on(mesh, name, recipe, dtype, tokens)
        linear.context.keeps_input = keeps
        calls: list[Any] = []

        def keep(a: GemmOperand, b: GemmOperand, calls: list[Any] = calls) -> None:
            calls.append((operand(a), operand(b)))

        with watched_gemms(keep):
            y = linear(x)
            y.backward(dy)
        assert linear.weight.grad is not None
        results = {"y": y.detach(), "dx": x.grad, "dw": whole(linear.weight.grad)}
        found[name] = {**dict(zip(GEMMS, calls, strict=True)), **results}
    return found


def linear_on(
    mesh: ParallelMesh, name: str, recipe: Recipe, dtype: torch.dtype, tokens: int = TOKENS
) -> tuple[QuantizedLinear, Tensor, Tensor]:
    """A linear, and this rank's parts of x and dy."""
    rank, tensor = mesh.tensor.rank, mesh.tensor.size
    x, w, dy = tensors(name, tokens)
    with mesh.device:
        linear = PackedLinear(IN, SECTIONS, mesh, GROUPS) if name == "packed" else LINEARS[name](mesh)
    linear.weight.data._local_tensor.copy_(w.chunk(tensor, 1 if name == "row" else 0)[rank])
    linear.context.name, linear.context.recipe = name, recipe
    linear.context.step_state = StepState(seed=3, step=4, micro_batch=5)
    if name == "row":
        x = x.chunk(tensor, 1)[rank]
        dy = dy.chunk(tensor)[rank] if mesh.sequence_parallel else dy
    else:
        x = x.chunk(tensor)[rank] if mesh.sequence_parallel else x
        dy = dy.chunk(tensor, 1)[rank]
    x, dy = (t.to(mesh.device, dtype).contiguous() for t in (x, dy))
    return linear, x.requires_grad_(), dy


@pytest.fixture(scope="module")
def one() -> dict[str, dict[str, Any]]:
    return launch(run, 1, 1, "nvfp4", False)[0]


@pytest.mark.parametrize(
    ("tensor", "precision", "sequence", "tokens"),
    [
        (2, "nvfp4", False, TOKENS),
        (8, "nvfp4", True, TOKENS),
        (4, "mxfp8", True, TOKENS),
        (2, "family", True, 256),
        (2, "quartet2", True, 256),  # each rank has whole groups of 128 output features and of 128 tokens
        (2, "nvfp4", True, 40),  # each rank has 20 tokens, not a multiple of 16, so it gathers before it quantizes
    ],
)
def test_codes_do_not_depend_on_the_tensor_parallel_size(tensor, precision, sequence, tokens, one):
    run_tokens = functools.partial(run, tokens=tokens)
    expected = one if (precision, tokens) == ("nvfp4", TOKENS) else launch(run_tokens, 1, 1, precision, False)[0]
    check_codes(launch(run_tokens, tensor, tensor, precision, sequence), expected)


def run_sections(rank: int, tensor: int, sequence: bool) -> dict[str, dict[str, Any]]:
    """For each part of a packed projection what `calls_on` returns; dx and dW are of all parts."""
    mesh = build_mesh(ParallelConfig(tensor=tensor, sequence=sequence), torch.device("cpu"))
    linear, x, dy = linear_on(mesh, "packed", NVFP4, torch.float32)
    x_part, others = (linear.context.part(sections, SECTIONS) for sections in (SECTIONS[1:2], SECTIONS[::2]))
    linear.context.parts = replace(x_part, name="x", recipe=RECIPES["mxfp8"]), replace(others, name="others")
    calls: list[Any] = []
    with watched_gemms(lambda a, b: calls.append((operand(a), operand(b)))):
        ys = linear(x)
        torch.autograd.backward(ys, [part.sharding.rows_of(dy.t()).t() for part in linear.context.parts])
    assert linear.weight.grad is not None
    gemms = (calls[0], *calls[2:4]), (calls[1], *calls[4:6])
    results = [{"y": y.detach(), "dx": x.grad, "dw": whole(linear.weight.grad)} for y in ys]
    return {
        part.name: {**dict(zip(GEMMS, of_part, strict=True)), **result}
        for part, of_part, result in zip(linear.context.parts, gemms, results, strict=True)
    }


def test_codes_of_parts_do_not_depend_on_the_tensor_parallel_size():
    one_rank = launch(run_sections, 1, 1, False)[0]
    for tensor, sequence in ((2, True), (4, False)):
        check_codes(launch(run_sections, tensor, tensor, sequence), one_rank)


def run_packed(rank: int, tensor: int, **settings: Any) -> tuple[dict[str, dict[str, Any]], list[str], list[Message]]:
    """`run` with operands packed as by a GPU's kernels. Returns also the names of the unpacking kernels that were
    launched, and the messages."""
    kernels, packed = kernel_layout.UnpackingKernels(), replace(FORMATS["nvfp4"], fused=(kernel_layout.PackedFP4,))
    sent: list[Message] = []
    weights_as_values = mock.patch.object(emulated, "keeps_codes", lambda _: False)
    with cuda.other_gpu(kernels), mock.patch.dict(FORMATS, nvfp4=packed), weights_as_values, counted_messages(sent):
        found = run(rank, tensor, "nvfp4", True, dtype=torch.bfloat16, **settings)
    return found, kernels.launched, sent


@contextmanager
def counted_messages(sent: list[Message]) -> Iterator[None]:
    """Inside, append every gather and scatter of tokens to `sent`: its name, and the bytes of the whole tensor."""

    def counted(name: str, whole: int) -> Any:
        original = getattr(messages, name)

        def collective(*tensors: Tensor, **settings: Any) -> Any:
            sent.append((name, tensors[whole].numel() * tensors[whole].element_size()))
            return original(*tensors, **settings)

        return mock.patch.object(messages, name, collective)

    with counted(GATHER, 0), counted(SCATTER, 1):
        yield


@pytest.fixture(scope="module")
def one_in_bf16() -> dict[str, dict[str, Any]]:
    return launch(functools.partial(run, dtype=torch.bfloat16), 1, 1, "nvfp4", False)[0]


@pytest.mark.parametrize(("tensor", "keeps"), [(2, True), (4, False)])
def test_ranks_send_packed_codes(tensor, keeps, one_in_bf16):
    """Their bytes are 9/32 of those of BF16."""
    results = launch(functools.partial(run_packed, keeps=keeps), tensor, tensor)
    check_codes([found for found, *_ in results], one_in_bf16, rtol=0.02)
    unpacked, sent = results[0][1:]
    x, dy = TOKENS * IN, TOKENS * 48
    column_messages = [(GATHER, x * 9 // 16), (GATHER, x * 9 // 16), (SCATTER, 2 * x)]
    row_messages = [(SCATTER, 2 * dy), (GATHER, dy * 9 // 16), (GATHER, dy * 9 // 16)]
    assert sent == 2 * column_messages + row_messages
    # The x of column-parallel linears, the dy of the row-parallel one, and its x if it is kept as codes.
    columns, rows = (unpacked.count(name) for name in ("square_blocks.unpack_kernel", "fp4.unpack_kernel"))
    # Every operand is unpacked twice, because the test reads it too.
    assert (columns, rows) == (2 * 3, 2 * (3 if keeps else 4))


def run_in_chunks(rank: int, tensor: int, precision: str, packed: bool) -> list[tuple[dict[str, Any], list[Message]]]:
    """Results and messages with whole slices, and in chunks."""
    mesh, found = build_mesh(ParallelConfig(tensor=tensor), torch.device("cpu")), []
    kernels = kernel_layout.UnpackingKernels() if packed else cuda.gpu
    formats = dict(FORMATS, nvfp4=replace(FORMATS["nvfp4"], fused=(kernel_layout.PackedFP4,))) if packed else FORMATS
    for fewest in (TOKENS, 16):
        results, sent = dict[str, Any](), list[Message]()
        found.append((results, sent))
        of_chunks = mock.patch.object(operands, "MIN_CHUNK", fewest)
        as_values = mock.patch.object(emulated, "keeps_codes", lambda _: False)
        with cuda.other_gpu(kernels), mock.patch.dict(FORMATS, formats), as_values, of_chunks, counted_messages(sent):
            for name in (*LINEARS, "packed"):
                linear, x, dy = linear_on(mesh, name, RECIPES[precision], torch.bfloat16)
                (y,) = linear(x) if name == "packed" else (linear(x),)
                y.backward(dy)
                assert linear.weight.grad is not None and x.grad is not None
                results |= {f"{name} y": y.detach(), f"{name} dx": x.grad, f"{name} dw": whole(linear.weight.grad)}
    return found


@pytest.mark.parametrize(
    ("tensor", "precision", "packed", "more"),
    [(2, "nvfp4", True, 8), (4, "nvfp4", False, 8), (2, "fp32", False, 7), (2, "mxfp8", False, 0)],
)
def test_chunks_have_the_bits_of_whole_slices(tensor, precision, packed, more):
    for (whole_slices, sent), (in_chunks, sent_in_chunks) in launch(run_in_chunks, tensor, tensor, precision, packed):
        for name, expected in whole_slices.items():
            assert torch.equal(in_chunks[name], expected), name
        # In chunks go what fprop and dgrad gather, unless dy is gathered once for both of its GEMMs, and all sums.
        assert sum(size for _, size in sent) == sum(size for _, size in sent_in_chunks)
        assert len(sent_in_chunks) - len(sent) == more


def run_native(rank: int, make_backend: type[Backend], recipe: Recipe) -> list[tuple[list[Tensor], list[Message]]]:
    """The results and messages of a native backend that sends codes, and of one that sends values."""
    mesh, found = build_mesh(ParallelConfig(tensor=2), torch.device("cpu")), []
    for sends_operands in (LinearCall.sends_operands, lambda *_: False):
        results, sent = list[Tensor](), list[Message]()
        found.append((results, sent))
        scaled_mm = mock.patch.object(torch_scaled_mm, "scaled_mm", cublas.scaled_mm)
        without = mock.patch.object(LinearCall, "sends_operands", sends_operands)
        with te_stand_in.installed(), scaled_mm, without, counted_messages(sent):
            for name in LINEARS:
                linear, x, dy = linear_on(mesh, name, recipe, torch.bfloat16)
                linear.context.backend = make_backend()
                y = linear(x)
                y.backward(dy)
                assert linear.weight.grad is not None and x.grad is not None
                results += [y.detach(), x.grad, whole(linear.weight.grad)]
    return found


# Rounded to nearest, because Transformer Engine draws other random numbers for slices of the tokens than for all.
# padded_out: the 48 output features of the row-parallel linear, padded.
@pytest.mark.parametrize(
    ("make_backend", "recipe", "padded_out"),
    [(TorchBackend, NVFP4, 48), (TransformerEngineBackend, rounded_to_nearest(NVFP4), 64)],
)
def test_native_backends_send_codes_and_compute_the_same_bits(make_backend, recipe, padded_out) -> None:
    for (with_codes, sent), (with_values, sent_values) in launch(run_native, 2, make_backend, recipe):
        assert all(torch.equal(one, other) for one, other in zip(with_codes, with_values, strict=True))
        x, dy = TOKENS * IN, TOKENS * 48
        assert gathered_bytes(sent) == [x * 9 // 16] * 4 + [TOKENS * padded_out * 9 // 16] * 2
        assert sum(gathered_bytes(sent_values)) >= 2 * (2 * x + dy)


def gathered_bytes(sent: list[Message]) -> list[int]:
    return [size for name, size in sent if name == GATHER]


def check_codes(ranks: list[dict[str, dict[str, Any]]], one: dict[str, dict[str, Any]], rtol: float = 1e-5) -> None:
    for name in one:
        for gemm in GEMMS:
            shards = (ROW_SHARDS if name == "row" else COLUMN_SHARDS)[gemm]
            for which, dim in enumerate(shards):
                parts = [rank[name][gemm][which] for rank in ranks]
                values, scale = one[name][gemm][which]
                if dim is None:
                    assert all(torch.equal(part[0], values) for part in parts), (name, gemm, which)
                else:
                    assert torch.equal(torch.cat([part[0] for part in parts], dim), values), (name, gemm, which)
                assert all(part[1] is scale is None or torch.equal(part[1], scale) for part in parts), (name, which)
        # One rank computes an element of dW; y (row-parallel) or dx (column-parallel) are sums over ranks.
        for result, dim in (("y", 1), ("dx", 0), ("dw", 0)) if name != "row" else (("y", 0), ("dx", 1), ("dw", 0)):
            shape, parts = one[name][result].shape, [rank[name][result] for rank in ranks]
            actual = parts[0] if parts[0].shape == shape else torch.cat(parts, dim)
            largest = one[name][result].abs().max().item()
            torch.testing.assert_close(actual, one[name][result], rtol=rtol, atol=rtol * largest)


def test_amax_per_shard_quantizes_every_shard_like_a_tensor(one):
    """`precision.amax=shard`: the codes of a shard are those of a tensor with only its elements."""
    ranks = launch(run, 2, 2, "nvfp4_shard", True)
    x, w, _ = tensors("row")
    for rank, found in enumerate(ranks):
        for index, (tensor, operand_format) in enumerate(((x, NVFP4.fprop.left), (w, NVFP4.fprop.right))):
            request = OperandRequest(operand_format, dtype=torch.float32)
            expected = quantize_operand(tensor.chunk(2, 1)[rank], WHOLE, request)
            values, scale = found["row"]["fprop"][index]
            assert torch.equal(values, expected.values)
            assert torch.equal(scale, expected.scale)
    for name, gemm, which in (("row", "fprop", 0), ("row", "wgrad", 1), ("column", "fprop", 1), ("column", "dgrad", 0)):
        (_, first), (_, second) = (rank[name][gemm][which] for rank in ranks)
        assert not torch.equal(first, second)
    # Operands that every rank has whole do not change.
    assert torch.equal(ranks[1]["column"]["fprop"][0][0], one["column"]["fprop"][0][0])
