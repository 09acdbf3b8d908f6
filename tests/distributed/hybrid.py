"""A small hybrid model with every kind of block, trained for a few steps on any mesh, and the operands of its GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from megatron_fp4.config.precision_schema import Bf16BlocksConfig
from megatron_fp4.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_fp4.parallel.data_parallel import apply_data_parallel
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh
from megatron_fp4.precision.emulated import EmulatedBackend, GemmOperand
from megatron_fp4.precision.plan import PrecisionController, build_plan
from megatron_fp4.precision.recipe import BF16, Recipe
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import build_optimizer, optimizer_parameters
from megatron_fp4.training.providers import MicroBatch
from models.execution import PLAIN, Execution
from models.hybrid import HybridModel, build_model
from models.initialization import initialize
from models.pattern import linear_shapes
from tests.precision.reference import FAMILY, MXFP8, NVFP4, QUARTET2
from tests.training.harness import launch, toy_batches, train_step, whole

# Tensor-parallel ranks can share every size: there are four KV heads and state groups. A group of in_proj has
# 16 + 16 + 8 + 8 + 2 rows, not a multiple of 16, as in the 12B model.
MODEL = ModelConfig(
    pattern="M*-G", vocab_size=64, hidden_dim=32, ffn_dim=64, num_query_heads=8, num_kv_heads=4, head_dim=8, rope=True,
    mamba_num_heads=8, mamba_head_dim=8, mamba_num_groups=4, mamba_state_dim=8, mamba_chunk_size=8, init_std=0.1,
)  # fmt: skip
LENGTH, ROWS = 32, 2

RECIPES = {
    "fp32": BF16,
    "nvfp4": NVFP4,
    "nvfp4_shard": replace(NVFP4, amax="shard"),
    "mxfp8": MXFP8,
    "quartet2": QUARTET2,
    "family": FAMILY,
}


@dataclass(frozen=True)
class Layout:
    """A mesh, and settings of data parallelism. num_micro_batches: per step, of all ranks together."""

    world: int
    tensor: int = 1
    expert: int = 1
    replicate: int = 1
    sequence: bool | None = None
    reshard: bool = False
    num_micro_batches: int = 4
    reduce: Literal["once", "each"] = "once"

    def mesh(self) -> ParallelMesh:
        parallel = ParallelConfig(
            tensor=self.tensor, expert=self.expert, replicate=self.replicate, sequence=self.sequence,
            reduce_gradients=self.reduce,
        )  # fmt: skip
        return build_mesh(parallel, torch.device("cpu"))


ONE = Layout(1)
LAYOUTS = {
    "tp2": Layout(2, tensor=2),
    "tp2_without_sequence_parallel": Layout(2, tensor=2, sequence=False, reshard=True),
    "dp2": Layout(2, reshard=True),
    "tp2_dp2": Layout(4, tensor=2),
    "tp2_dp2_each": Layout(4, tensor=2, reduce="each"),
    "tp2_hsdp2": Layout(4, tensor=2, replicate=2),
    "hsdp2_dp2": Layout(4, replicate=2, reshard=True),
}


def launch_each(function: Callable[..., Any], *cases: tuple[Any, ...]) -> dict[tuple[Any, ...], list[Any]]:
    """Call function(rank, layout, *rest) on every rank for each case, a tuple (layout, *rest); returns for each what
    the ranks returned. Cases of as many ranks share their processes, where the first pass through a model is slow."""
    results: dict[tuple[Any, ...], list[Any]] = {}
    for world in sorted({case[0].world for case in cases}):
        shared = [case for case in cases if case[0].world == world]
        results |= dict(zip(shared, map(list, zip(*launch(_each, world, function, shared), strict=True)), strict=True))
    return results


def _each(rank: int, function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    return [function(rank, *case) for case in cases]


@dataclass
class Result:
    """The results of one rank. Gradients (of the first step, as the optimizer gets them) and weights are whole tensors.

    codes: (step, micro-batch) -> values and scales of both operands of each quantized GEMM, in order.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    codes: dict[tuple[int, int], list[Any]] = field(default_factory=dict)


def micro_batches(step: int, mesh: ParallelMesh, number: int = ONE.num_micro_batches) -> list[MicroBatch]:
    """This rank's share of a step's micro-batches."""
    return toy_batches(step, mesh, number, ROWS, MODEL.vocab_size, LENGTH)


def controlled_model(
    mesh: ParallelMesh,
    recipe: Recipe,
    step_state: StepState,
    config: ModelConfig = MODEL,
    dtype: torch.dtype = torch.float32,
    reshard: bool = False,
    execution: Execution = PLAIN,
) -> tuple[HybridModel, PrecisionController]:
    """A model, built as in a run, with all linears in `recipe`."""
    with torch.device("meta"):
        model = build_model(config, mesh, dtype, execution)
    apply_data_parallel(
        model, mesh, units=[*model.blocks, *model.mtp], fp32_units=model.fp32_units(), compute_dtype=dtype,
        reshard=reshard, ends=[model.embedding, model.head],
    )  # fmt: skip
    model.to_empty(device=mesh.device)
    initialize(model, config, seed=7)
    plan = build_plan(linear_shapes(config), recipe, Bf16BlocksConfig(), config.num_blocks)
    contexts = {name: module.context for name, module in model.linears()}
    return model, PrecisionController(contexts, plan, step_state)


def sharded_model(layout: Layout, mesh: ParallelMesh, recipe: Recipe, step_state: StepState) -> HybridModel:
    return controlled_model(mesh, recipe, step_state, reshard=layout.reshard)[0]


def masked_micro_batches(step: int, mesh: ParallelMesh, number: int = ONE.num_micro_batches) -> list[MicroBatch]:
    """`micro_batches`, in which documents have a few tokens or whole rows. Targets in another document do not count, so
    from a third to all targets of a micro-batch count."""
    masked = []
    for batch in micro_batches(step, mesh, number):
        generator = torch.Generator().manual_seed(2000 * step + batch.index)
        begins = torch.rand(ROWS, LENGTH + 1, generator=generator) < (0.7, 0.0, 0.1, 0.4)[batch.index % 4]
        documents = begins.index_fill(1, torch.tensor(0), False).cumsum(1, dtype=torch.int32)
        targets = batch.targets.masked_fill(documents[:, 1:] != documents[:, :-1], -1)
        numbers = documents[:, :-1].contiguous()
        count = int((numbers[:, -1] + 1).sum())
        masked.append(MicroBatch(batch.index, batch.tokens, targets, numbers, count, int((targets >= 0).sum())))
    return masked


def train(
    rank: int,
    layout: Layout,
    precision: str,
    steps: int = 3,
    batches: Callable[[int, ParallelMesh, int], list[MicroBatch]] = micro_batches,
) -> Result:
    """Train `steps` steps, on every rank of the layout."""
    mesh, step_state = layout.mesh(), StepState(seed=11)
    model = sharded_model(layout, mesh, RECIPES[precision], step_state)
    # A larger eps than usual, because Adam would make a full step from a gradient that is only rounding error.
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3, eps=1e-5))
    result = Result()
    names = {parameter: name for name, parameter in model.named_parameters()}

    def keep_gradients(*_: object) -> None:
        if not result.gradients:
            for parameter in optimizer_parameters(optimizer):
                assert parameter.grad is not None, names[parameter]
                result.gradients[names[parameter]] = whole(parameter.grad)

    def keep_codes(a: GemmOperand, b: GemmOperand) -> None:
        if a.quantized:
            result.codes.setdefault((step_state.step, step_state.micro_batch), []).append((*operand(a), *operand(b)))

    optimizer.register_step_pre_hook(keep_gradients)
    for step in range(steps):
        own_batches = batches(step, mesh, layout.num_micro_batches)
        with watched_gemms(keep_codes):
            done = train_step(model, optimizer, own_batches, mesh, step_state, step=step)
        result.losses.append(done.loss)
        result.norms.append(done.grad_norm)
    result.weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return result


@contextmanager
def watched_gemms(watch: Callable[[GemmOperand, GemmOperand], None]) -> Iterator[None]:
    """Inside, call `watch` with both operands of every GEMM of a linear."""
    gemm = EmulatedBackend.gemm

    def watched(self: EmulatedBackend, a: GemmOperand, b: GemmOperand, *settings: Any) -> Tensor:
        watch(a, b)
        return gemm(self, a, b, *settings)

    with mock.patch.object(EmulatedBackend, "gemm", watched):
        yield


def operand(given: GemmOperand) -> tuple[Tensor, Tensor | None]:
    """Copies of its values and its tensor scale."""
    return given.unpacked().detach().clone(), None if given.scale is None else given.scale.clone()
