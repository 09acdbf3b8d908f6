"""Every linear that can be configured has the sizes that kernels require; a CPU tests this without the kernels."""

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from megatron_fp4.config.precision_schema import Bf16BlocksConfig
from megatron_fp4.config.schema import ConfigError, ParallelConfig
from megatron_fp4.parallel.mesh import build_mesh
from megatron_fp4.planning.dry_run import fake_ranks, planned_gpu
from megatron_fp4.precision import emulated, torch_scaled_mm
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend import Alignment, Backend, block_alignment
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.linear import grouped_linear, quantized_linear
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.plan import LinearShape, build_plan
from megatron_fp4.precision.recipe import Recipe, recipe_from_config, switched_recipe
from megatron_fp4.precision.support import check_sizes, first_refusal
from models.hybrid import build_model
from models.planned import EvenSegments
from tests.composing import CONFIGS, composed, validate
from tests.precision import reference as ref

MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
PRECISIONS = sorted(path.stem for path in (CONFIGS / "precision").glob("*.yaml"))
# The last micro-batch of a validation may not have a multiple of 32 or 128 tokens; 128 fill blocks of every format.
TOKENS = (16, 128)


@functools.cache
def recipes() -> dict[str, Recipe]:
    """Every shipped recipe, and recipes after a switch of one pass."""
    found = {name: recipe_from_config(composed("model=tiny", f"precision={name}").precision) for name in PRECISIONS}
    for current, target in (("nvfp4", "mxfp8"), ("nvfp4", "bf16"), ("mxfp4", "nvfp4"), ("nvfp4_quartet2", "fp8_block")):
        for scope in ("forward", "backward"):
            found[f"{current} {scope} {target}"] = switched_recipe(found[current], found[target], scope)
    different = {replace(recipe, name=""): name for name, recipe in found.items() if recipe.quantized}
    return {name: found[name] for name in different.values()}


def linears(tensor: int) -> list[tuple[tuple[int, int], LinearContext]]:
    """The shapes [out, in] of the local weights of all shipped models that run on `tensor` ranks, and their contexts;
    only one of those whose sizes are equal modulo 128, because kernels require multiples of 128 at most."""
    mesh, found = build_mesh(ParallelConfig(tensor=tensor), torch.device("cpu")), {}
    for model in MODELS:
        config = composed(f"model={model}")
        try:
            validate(replace(config, parallel=replace(config.parallel, tensor=tensor)), tensor, "cuda")
        except ConfigError:
            continue
        with torch.device("meta"):
            pattern = "".join(sorted(set(config.model.pattern)))
            built = build_model(replace(config.model, pattern=pattern), mesh, torch.bfloat16)
        for _, module in built.linears():
            context, (*_, outputs, inputs) = module.context, module.weight.to_local().shape  # type: ignore[union-attr]
            sharding = context.sharding
            has_slices, groups = (sharding.in_tokens is not None, sharding.out_tokens is not None), sharding.num_groups
            sizes = outputs // groups % 128, outputs % 128, inputs % 128, groups > 1
            found[sizes, has_slices, sharding.keep_padding, context.num_experts > 0] = (outputs, inputs), context
    assert len(found) >= 4
    return list(found.values())


def compute(backend: Backend, by_name: Mapping[str, Recipe], tensor: int) -> None:
    """Compute forward and backward passes of the linears with each recipe that fits their inputs, on fake tensors and
    in the code path of a GPU. Pairs of a recipe and a linear alternate between the two numbers of tokens."""
    with fake_ranks(tensor):
        layers = linears(tensor)
        with FakeTensorMode(), planned_gpu():
            pairs = itertools.product(enumerate(by_name.items()), enumerate(layers))
            for (i, (name, recipe)), (j, ((outputs, inputs), context)) in pairs:
                tokens = TOKENS[(i + j) % 2]
                experts, alignment = context.num_experts, backend.alignment(recipe)
                refuses_experts = outputs % alignment.outputs or backend.name == "torch"
                if inputs % alignment.inputs or (experts and refuses_experts):
                    continue
                context = replace(context, recipe=recipe, backend=backend, weight_cache=None)
                sharding = context.sharding
                groups = sharding.in_tokens, sharding.out_tokens
                gathered, scattered = (1 if group is None else group.size() for group in groups)
                x = torch.empty(tokens, inputs, dtype=torch.bfloat16, requires_grad=True)
                weight = nn.Parameter(torch.empty(*([2] if experts else []), outputs, inputs))
                counts, numbers = torch.empty(2, dtype=torch.int64), torch.empty(tokens, dtype=torch.int64)
                try:
                    if experts:
                        y = grouped_linear(x, weight, context, EvenSegments.of_experts(counts, numbers))
                    else:
                        y = quantized_linear(x, weight, context)
                    y.backward(torch.empty_like(y))
                except Exception as error:
                    raise AssertionError(f"{name}: {tokens} tokens, {inputs} -> {outputs}") from error
                assert y.shape[0] * scattered == tokens * gathered
                assert y.shape[1] == outputs or (sharding.keep_padding and y.shape[1] > outputs)
                assert x.grad is not None and x.grad.shape == x.shape
                assert weight.grad is not None and weight.grad.shape == weight.shape


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 4])
def test_kernels_take_every_linear_of_shipped_models(tensor: int) -> None:
    """Quantizers check the sizes that they get, and PyTorch quantizes nothing."""
    slow = mock.Mock(side_effect=AssertionError("a quantizer without a kernel"))
    with mock.patch.object(emulated, "encode_operand", slow):
        compute(EMULATED, recipes(), tensor)


def taken_by(backend: str) -> dict[str, Recipe]:
    return {name: recipe for name, recipe in recipes().items() if first_refusal(backend, recipe, "bfloat16") is None}


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 8])
def test_scaled_mm_takes_every_product(tensor: int) -> None:
    """PyTorch's own function for tensors without data checks what a call requires on CUDA."""
    seen: set[tuple[torch.dtype, torch.dtype]] = set()

    def shape_of(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    def checked(a: Tensor, b: Tensor, **settings: Any) -> Tensor:
        with unset_fake_temporarily():
            for name in ("scale_a", "scale_b"):
                settings[name] = [shape_of(scale) for scale in settings[name]]
            product = torch.nn.functional.scaled_mm(shape_of(a), shape_of(b), **settings)
        seen.add((a.dtype, product.dtype))
        return a.new_empty(product.shape, dtype=product.dtype)

    slow = mock.Mock(side_effect=AssertionError("a quantizer without a kernel"))
    functions = mock.patch.object(torch_scaled_mm, "scaled_mm", checked)
    with functions, mock.patch.object(emulated, "encode_operand", slow):
        compute(torch_scaled_mm.TorchBackend(), taken_by("torch"), tensor)
    codes_of = (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
    assert seen == {(codes, product) for codes in codes_of for product in (torch.bfloat16, torch.float32)}


# Transformer Engine's quantizers -> codes per byte, and the multiple that both sizes of a tensor must be.
TE_SIZES = {"NVFP4Quantizer": (2, 16), "MXFP8Quantizer": (1, 32), "Float8BlockQuantizer": (1, 128)}


class Storage:
    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def get_metadata(self) -> dict[str, Any]:
        return dict(self.parts)


def scales_of(name: str, rows: int, k: int, square: bool, transposed: bool) -> Tensor:
    """Scales of the shape that `get_scale_shape` returns. rows, k: of the operand. transposed: MXFP8's columnwise
    data."""

    def padded(size: int, multiple: int) -> int:
        return -(-size // multiple) * multiple

    if name == "Float8BlockQuantizer":
        return torch.empty(-(-rows // 128), padded(k // 128, 4)) if square else torch.empty(k // 128, padded(rows, 4))
    scales = torch.empty(padded(rows, 128), padded(k // TE_SIZES[name][1], 4), dtype=torch.uint8)
    return scales.t().contiguous() if transposed else scales


def quantizer(name: str) -> Callable[..., Callable[[Tensor], Storage]]:
    per_byte, multiple = TE_SIZES[name]

    def quantize(x: Tensor, square: bool) -> Storage:
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        assert not any(size % multiple for size in x.shape), f"{name}: {tuple(x.shape)}"
        parts: dict[str, Any] = {"kind": name, "square": square}
        for side, operand in (("rowwise", x), ("columnwise", x.t())):
            transposed = name == "MXFP8Quantizer" and side == "columnwise"
            data = torch.empty(operand.shape[0], operand.shape[1] // per_byte, dtype=torch.uint8)
            parts[f"{side}_data"] = data.t().contiguous() if transposed else data
            parts[f"{side}_scale_inv"] = scales_of(name, *operand.shape, square, transposed)
            parts |= {f"amax_{side}": torch.empty(1)} if per_byte == 2 else {}
        return Storage(**parts)

    def made(*_: Any, block_scaling_dim: int = 1, **settings: Any) -> Any:
        return mock.Mock(side_effect=functools.partial(quantize, square=block_scaling_dim == 2), kind=name)

    return made


def te_gemm(a: Storage, b: Storage, *, out_dtype: torch.dtype, layout: str, out: Tensor | None, **_: Any) -> Any:
    """Check what cuBLAS requires: dot products of equal sizes, rows of a multiple of 16 bytes of codes, and scales of
    the shapes that quantizers make."""

    def sizes(storage: Storage, columnwise: bool) -> list[int]:
        kind, side = storage.parts["kind"], "columnwise" if columnwise else "rowwise"
        data, scales = (storage.parts[f"{side}_{part}"] for part in ("data", "scale_inv"))
        assert data.shape[1] % 16 == 0, f"{kind}: {data.shape[1]} bytes in a row"
        transposed = columnwise and kind == "MXFP8Quantizer"
        rows, k = data.shape[0], data.shape[1] * TE_SIZES[kind][0]
        rows, k = (k, rows) if transposed else (rows, k)
        expected = scales_of(kind, rows, k, storage.parts["square"], transposed)
        assert data.is_contiguous() and scales.is_contiguous() and scales.dtype == expected.dtype
        assert scales.shape == expected.shape, f"{kind}: scales {tuple(scales.shape)} of [{rows}, {k}]"
        return [rows, k]

    (columns, k), (rows, other) = sizes(a, layout[0] == "N"), sizes(b, layout[1] == "T")
    assert k == other and rows % 16 == columns % 16 == 0, f"{layout}: [{rows}, {other}] and [{columns}, {k}]"
    assert out is None or (out.shape == (rows, columns) and out.dtype == out_dtype)
    return [torch.empty(rows, columns, dtype=out_dtype) if out is None else out]


def te_split(x: Tensor, rows: list[int], quantizers: list[Any]) -> list[Storage]:
    multiple = 128 if quantizers[0].kind == "NVFP4Quantizer" else 1
    assert not any(size % multiple for size in (*rows, x.shape[1])) and len(rows) == len(quantizers) <= 64
    return [quantizer(part) for quantizer, part in zip(quantizers, x.split(rows), strict=True)]


def te_grouped_gemm(*operands: Any, layout: str, m_splits: list[int], **_: Any) -> None:
    for a, b, out in zip(*operands[:3], strict=True):
        te_gemm(a, b, out_dtype=out.dtype, layout=layout, out=out)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 8])
def test_transformer_engine_takes_every_tensor_and_product(tensor: int) -> None:
    quantizers = {name: quantizer(name) for name in TE_SIZES}
    gemms = {"general_gemm": te_gemm, "general_grouped_gemm": te_grouped_gemm}
    library = SimpleNamespace(e4m3=None, split_quantize=te_split, **gemms, **quantizers)
    with (
        mock.patch.object(te, "_library", lambda: library),
        mock.patch.object(te, "_seeded", lambda *_: nullcontext()),
        mock.patch.object(torch.cuda, "device", lambda _: nullcontext()),
    ):
        compute(te.TransformerEngineBackend(), taken_by("transformer_engine"), tensor)


NVFP4, MXFP4, FP8 = ref.NVFP4, ref.MXFP4, ref.FP8


def test_padding_of_groups_and_tokens() -> None:
    assert block_alignment(ref.changed(NVFP4, wgrad_rht=128, fprop_rht=32)) == Alignment(128, 32, 16, 16)
    alignment = Alignment(outputs=32, group_outputs=16)
    assert [alignment.padded_group(*sizes) for sizes in ((20, 1), (20, 2), (16, 2), (16, 3))] == [32, 32, 16, 32]
    assert Alignment(outputs=128, group_outputs=16).padded_group(2836, 8) == 2848
    assert Alignment(tokens=32).padded_tokens(2064) == 2080
    # Groups that need padding are padded for the faster kernel if that costs little.
    alignment = te.alignment(NVFP4)
    assert alignment == Alignment(32, 32, 32, 16, fast_outputs=128, of_experts=128)
    assert te.alignment(ref.changed(NVFP4, wgrad_rht=0)).fast_outputs == te.alignment(FP8).fast_outputs == 1
    assert alignment.padded_group(2320, 1) == 2432 and alignment.padded_group(2836, 2) == 2880
    assert alignment.padded_group(2836, 8) == 2848  # together a multiple of 128
    assert alignment.padded_group(2848, 1) == 2848  # not padded
    assert alignment.padded_group(40, 1) == 64  # 128 would be twice as much


def test_a_transform_of_dgrad_does_not_mix_output_features_of_two_ranks() -> None:
    """On another mesh the transform would mix other groups of 128. Groups of features (heads) are padded one by one."""
    shape = LinearShape("blocks.0.mixer.up_proj", 0, 512, 640, "-", "model.hidden_dim", False, "FFN blocks' up_proj")
    for fits, tensor in ((shape, 1), (shape, 5), (replace(shape, groups=10), 2), (replace(shape, out_features=768), 2)):
        check_sizes(build_plan([fits], ref.QUARTET2, Bf16BlocksConfig(), 1), tensor, "emulated")
    message = "640 output features of FFN blocks' up_proj are not a multiple of parallel.tensor=2 x 128 = 256"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_sizes(build_plan([shape], ref.QUARTET2, Bf16BlocksConfig(), 1), 2, "emulated")
