"""What kernels demand is met by every linear that can be configured: no GPU is the first to find out."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.precision_schema import Bf16BlocksConfig
from megatron_fp4.config.schema import Config, ConfigError, ParallelConfig
from megatron_fp4.parallel.mesh import build_mesh
from megatron_fp4.planning.dry_run import fake_ranks
from megatron_fp4.precision import emulated
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.backend import Alignment, block_alignment
from megatron_fp4.precision.linear import LinearContext, quantized_linear
from megatron_fp4.precision.overlapped import overlapped_linear
from megatron_fp4.precision.plan import LinearShape, build_plan
from megatron_fp4.precision.recipe import BF16, Recipe, recipe_from_config, switched_recipe
from megatron_fp4.precision.support import check_sizes
from models.hybrid import build_model
from tests.composing import validate
from tests.planning.gpu_path import without_launches
from tests.precision import reference as ref
from tests.recipes import changed

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
PRECISIONS = sorted(path.stem for path in (CONFIGS / "precision").glob("*.yaml"))
# The fewest of a micro-batch, and what a validation's last one may leave: no multiple of 32 or 128.
TOKENS = (2064, 16)


@functools.cache
def composed(model: str, precision: str = "nvfp4") -> Config:
    return compose_config([f"model={model}", f"precision={precision}"], CONFIGS)


@functools.cache
def recipes() -> dict[str, Recipe]:
    """Every shipped recipe, and what switches of one pass between some leave."""
    found = {name: recipe_from_config(composed("tiny", name).precision) for name in PRECISIONS}
    for current, target in (("nvfp4", "mxfp8"), ("nvfp4", "bf16"), ("mxfp4", "nvfp4"), ("nvfp4_quartet2", "fp8_block")):
        for scope in ("forward", "backward"):
            found[f"{current} {scope} {target}"] = switched_recipe(found[current], found[target], scope)
    different = {replace(recipe, name=""): name for name, recipe in found.items() if recipe.quantized}
    return {name: found[name] for name in different.values()}


def linears(tensor: int) -> list[tuple[tuple[int, int], LinearContext]]:
    """The local weights [out, in] of all shipped models that run on `tensor` ranks, and their context: one of those
    whose sizes are alike to kernels, which ask for multiples of 128 at most."""
    mesh, found = build_mesh(ParallelConfig(tensor=tensor), torch.device("cpu")), {}
    for model in MODELS:
        config = composed(model)
        try:
            validate(replace(config, parallel=replace(config.parallel, tensor=tensor)), tensor, "cuda")
        except ConfigError:
            continue
        with torch.device("meta"):
            pattern = "".join(sorted(set(config.model.pattern)))
            built = build_model(replace(config.model, pattern=pattern), mesh, torch.bfloat16)
        for _, module in built.linears():
            context, (outputs, inputs) = module.context, module.weight.to_local().shape  # type: ignore[union-attr]
            sliced = context.in_tokens is not None, context.out_tokens is not None
            sizes = outputs // context.num_groups % 128, outputs % 128, inputs % 128, context.num_groups > 1
            found[sizes, sliced, context.keep_padding] = (outputs, inputs), context
    assert len(found) >= 4
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 4])
def test_no_kernel_refuses_a_linear_of_a_shipped_model(tensor: int) -> None:
    """Forward and backward, on the way of a GPU, whose launches check what they are given, and none goes to PyTorch."""
    slow = mock.Mock(side_effect=AssertionError("a quantizer without a kernel"))
    with fake_ranks(tensor):
        layers = linears(tensor)
        with FakeTensorMode(), without_launches(), mock.patch.object(emulated, "encode_operand", slow):
            for (name, recipe), ((outputs, inputs), context) in itertools.product(recipes().items(), layers):
                if inputs % block_alignment(recipe).inputs:
                    continue  # refused
                context = replace(context, recipe=recipe, weight_cache=None)
                linear = quantized_linear if context.in_tokens is context.out_tokens is None else overlapped_linear
                gathered, scattered = (1 if of is None else of.size() for of in (context.in_tokens, context.out_tokens))
                for tokens in TOKENS:
                    x = torch.empty(tokens, inputs, dtype=torch.bfloat16, requires_grad=True)
                    weight = nn.Parameter(torch.empty(outputs, inputs))
                    try:
                        y = linear(x, weight, context)
                        y.backward(torch.empty_like(y))
                    except Exception as error:
                        raise AssertionError(f"{name}: {tokens} tokens, {inputs} -> {outputs}") from error
                    assert y.shape[0] * scattered == tokens * gathered
                    assert y.shape[1] == outputs or (context.keep_padding and y.shape[1] > outputs)
                    assert x.grad is not None and x.grad.shape == x.shape
                    assert weight.grad is not None and weight.grad.shape == weight.shape


NVFP4, MXFP4, FP8 = ref.NVFP4, ref.MXFP4, ref.FP8


def test_blocks_and_transforms() -> None:
    assert block_alignment(BF16) == Alignment()
    for recipe, sizes in (
        (NVFP4, (16, 16, 16, 16)),
        (MXFP4, (32, 32, 32, 32)),
        (FP8, (128, 128, 128, 128)),
        (changed(NVFP4, dgrad_rht=64), (16, 16, 64, 64)),
        (changed(NVFP4, wgrad_rht=128, fprop_rht=32), (128, 32, 16, 16)),
        (changed(NVFP4, wgrad_activation=ref.F8), (128, 128, 128, 128)),
    ):
        assert block_alignment(recipe) == Alignment(*sizes)


def test_groups_are_padded_alike_and_whole_tensors_too() -> None:
    alignment = Alignment(outputs=32, group_outputs=16)
    assert [alignment.padded_group(*of) for of in ((20, 1), (20, 2), (16, 2), (16, 3))] == [32, 32, 16, 32]
    assert Alignment(outputs=128, group_outputs=16).padded_group(2836, 8) == 2848
    assert Alignment(tokens=32).padded_tokens(2064) == 2080
    # What is padded anyway is padded for the faster kernel where that costs little.
    alignment = te.alignment(NVFP4)
    assert alignment == Alignment(32, 32, 32, 16, fast_outputs=128)
    assert te.alignment(changed(NVFP4, wgrad_rht=0)).fast_outputs == te.alignment(FP8).fast_outputs == 1
    assert alignment.padded_group(2320, 1) == 2432 and alignment.padded_group(2836, 2) == 2880
    assert alignment.padded_group(2836, 8) == 2848  # together a multiple of 128
    assert alignment.padded_group(2848, 1) == 2848  # not padded
    assert alignment.padded_group(40, 1) == 64  # 128 would be twice as much


def test_a_transform_of_dgrad_does_not_mix_output_features_of_two_ranks() -> None:
    """Its groups of 128 would be others on other meshes. Groups of features (heads) are padded one by one."""
    shape = LinearShape("blocks.0.mixer.up_proj", 0, 512, 640, "-", "model.hidden_dim", False, "FFN blocks' up_proj")
    for fits, tensor in ((shape, 1), (shape, 5), (replace(shape, groups=10), 2), (replace(shape, out_features=768), 2)):
        check_sizes(build_plan([fits], ref.QUARTET2, Bf16BlocksConfig(), 1), tensor, "emulated")
    message = "640 output features of FFN blocks' up_proj / parallel.tensor=2 are not a multiple of 256"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_sizes(build_plan([shape], ref.QUARTET2, Bf16BlocksConfig(), 1), 2, "emulated")
