from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from megatron_fp4.parallel.data_parallel import apply_data_parallel
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.fp32_gradients import rounded_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import optimizer_state
from megatron_fp4.training.step import StepRequests, StepResult
from tests.training.harness import ToyBatch, alone, launch, toy, toy_batches, toy_mesh, train_step, whole


def _train(rank: int, num_steps: int, replicate: int = 1, **keywords: Any) -> tuple[list[float], list[float], Tensor]:
    mesh = toy_mesh(replicate=replicate)
    model, optimizer = toy(mesh)
    step_state = StepState(seed=0)
    results = [
        train_step(
            model, optimizer, toy_batches(step, mesh), mesh, step_state, step=step, lr=1e-2, clip_norm=1.0, **keywords
        )
        for step in range(num_steps)
    ]
    assert step_state.weights_version == num_steps and not any(r.skipped or r.requests.stop for r in results)
    return [r.loss for r in results], [r.grad_norm for r in results], whole(model.head.weight)


def test_two_ranks_are_one_twice_and_repeatable() -> None:
    both = launch(_train, 2, 4)
    single = launch(_train, 1, 4)[0]
    assert both[0][:2] == both[1][:2] and torch.equal(both[0][2], both[1][2])
    assert both[0][0] == pytest.approx(single[0], rel=1e-5)
    assert both[0][1] == pytest.approx(single[1], rel=1e-5)
    assert torch.allclose(both[0][2], single[2], atol=1e-5)
    again = launch(_train, 2, 4)
    assert again[0][:2] == both[0][:2] and torch.equal(again[0][2], both[0][2])


def test_hybrid_sharding_is_one_rank_too() -> None:
    single = launch(_train, 1, 3)[0]
    for losses, norms, weight in launch(_train, 4, 3, 2):
        assert losses == pytest.approx(single[0], rel=1e-5)
        assert norms == pytest.approx(single[1], rel=1e-5)
        assert torch.allclose(weight, single[2], atol=1e-5)


def _kept_or_freed(rank: int) -> tuple[Any, Any]:
    return _train(rank, 2, 1, reshard=False), _train(rank, 2, 1, reshard=True)


def test_freeing_parameters_between_micro_batches_changes_nothing() -> None:
    kept, freed = launch(_kept_or_freed, 2)[0]
    assert kept[:2] == freed[:2] and torch.equal(kept[2], freed[2])


def always(loss: float, norm: float) -> bool:
    """The host decides, because SGD cannot leave out an update on the device."""
    return True


class Watching(nn.Module):
    """Notes the StepState at every forward."""

    def __init__(self, step_state: StepState) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.step_state = step_state
        self.seen: list[tuple[int, int, int]] = []

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.seen.append((self.step_state.step, self.step_state.micro_batch, self.step_state.weights_version))
        return self.weight * tokens.float().mean()


def _constant(index: int, value: float) -> ToyBatch:
    return ToyBatch(index, torch.tensor([[value]]), torch.tensor([[0]]))


def test_the_step_state_the_loss_and_the_clipped_update() -> None:
    with alone() as mesh:
        step_state = StepState(seed=0)
        model = Watching(step_state)
        optimizer = torch.optim.SGD(model.parameters(), lr=123.0)
        batches = [_constant(4, 1.0), _constant(6, 5.0)]
        result = train_step(model, optimizer, batches, mesh, step_state, step=7, lr=0.5, clip_norm=2.0, accept=always)
        assert (result.loss, result.grad_norm, result.skipped) == (3.0, 3.0, False)
        assert model.seen == [(7, 4, 0), (7, 6, 0)] and step_state.weights_version == 1
        assert model.weight.item() == pytest.approx(1.0 - 0.5 * 2.0)
        assert model.weight.grad is None
        assert not result.requests.stop
        settings: dict[str, Any] = {"lr": 0.5, "clip_norm": 0.0, "accept": always, "requests": StepRequests(stop=True)}
        assert train_step(model, optimizer, batches, mesh, step_state, step=8, **settings).requests.stop


def _one_bad(rank: int, bad_rank: int) -> dict[str, Any]:
    """A step whose gradient is NaN on one rank only, between two good ones."""
    mesh = toy_mesh()
    model, optimizer = toy(mesh)
    step_state = StepState(seed=0)

    def step(number: int) -> Any:
        return train_step(
            model, optimizer, toy_batches(number, mesh), mesh, step_state, step=number, lr=1e-2, clip_norm=1.0
        )

    def snapshot() -> dict[str, Tensor]:
        state = {**model.state_dict(), **optimizer_state(model, optimizer)}
        return {name: whole(value) for name, value in state.items()}

    step(0)
    before, version = snapshot(), step_state.weights_version
    poison = None
    if rank == bad_rank:  # the loss stays finite
        poison = model.blocks[0].register_forward_hook(
            lambda module, inputs, output: output.register_hook(lambda gradient: gradient * math.nan) and None
        )
    bad = step(1)
    if poison is not None:
        poison.remove()
    after = snapshot()
    return {
        "bad": bad,
        "untouched": all(torch.equal(before[name], after[name]) for name in before),
        "version": step_state.weights_version == version,
        "no_gradients": all(p.grad is None for p in model.parameters()),
        "next": step(2),
    }


def test_a_nan_gradient_on_one_rank_is_skipped_by_all() -> None:
    for outcome in launch(_one_bad, 2, 1):
        assert outcome["bad"].skipped and math.isfinite(outcome["bad"].loss)
        assert math.isnan(outcome["bad"].grad_norm)
        assert outcome["untouched"] and outcome["version"] and outcome["no_gradients"]
        assert not outcome["next"].skipped


def _ahead_or_not(rank: int, clip_norm: float) -> tuple[dict[str, Tensor], dict[str, Tensor], list[StepResult]]:
    """Weights and moments after good steps and a bad one: updated before the host has read, and behind it."""
    outcomes, results = [], []
    for accept in (None, lambda *_: True):
        mesh = toy_mesh()
        model, optimizer = toy(mesh)
        step_state = StepState(seed=0)
        for step in range(4):
            batches = toy_batches(step, mesh)
            poison = None
            if step == 2 and rank == 1:
                poison = model.blocks[0].register_forward_hook(
                    lambda module, inputs, output: output.register_hook(lambda gradient: gradient * math.inf) and None
                )
            settings: dict[str, Any] = {"step": step, "lr": 1e-2, "clip_norm": clip_norm, "accept": accept}
            results.append(train_step(model, optimizer, batches, mesh, step_state, **settings))
            if poison is not None:
                poison.remove()
        assert step_state.weights_version == 3
        state = {**model.state_dict(), **optimizer_state(model, optimizer)}
        outcomes.append({name: whole(value) for name, value in state.items()})
    return outcomes[0], outcomes[1], results


@pytest.mark.parametrize("clip_norm", [0.0, 0.3, 1e6])
def test_an_update_launched_before_the_numbers_are_read_has_the_same_bits(clip_norm: float) -> None:
    for ahead, behind, results in launch(_ahead_or_not, 2, clip_norm):
        assert [result.skipped for result in results] == [False, False, True, False] * 2
        assert results[0] == results[4] and results[3] == results[7] and results[3].grad_norm > 0.3
        assert ahead.keys() == behind.keys() and all(torch.equal(ahead[name], behind[name]) for name in ahead)
        assert all(value == 3 for name, value in ahead.items() if name.endswith(".step"))


class _Fp32Wgrad(torch.autograd.Function):
    """y = x W^T whose weight gradient leaves the GEMM, and reaches the parameter, in FP32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: DTensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ rounded_part(weight).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, DTensor]:
        x, weight = ctx.saved_tensors
        local = gradients[0].float().T @ x.float()
        return None, DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False)


class Fp32Wgrad(nn.Module):
    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        local = torch.zeros(4, 6)
        self.weight = nn.Parameter(DTensor.from_local(local, mesh.tp, [Replicate()], run_check=False))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.weight.dtype != torch.float32:
            self.weight.grad_dtype = torch.float32
        y = _Fp32Wgrad.apply(tokens.to(torch.bfloat16), self.weight)
        return (y.float() * targets).sum()  # so that dy = targets, exactly


def _sixty_four(rank: int) -> tuple[Tensor, Tensor]:
    mesh = toy_mesh()
    model: Any = Fp32Wgrad(mesh)
    apply_data_parallel(model, mesh, units=[], fp32_units=[], compute_dtype=torch.bfloat16, reshard=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(0)
    # Small integers: every FP32 sum below is exact, whatever its order, and few BF16 sums are.
    batches = [
        ToyBatch(index, *torch.randint(-15, 16, (3, 10), generator=generator).split([6, 4], dim=1))
        for index in range(64)
    ]
    mine = batches[rank :: mesh.dp_size]
    train_step(model, optimizer, mine, mesh, StepState(seed=0), step=0, lr=1.0, clip_norm=0.0, accept=always)
    exact = torch.stack([b.targets.double().T @ b.tokens.double() for b in batches]).sum(0) / 64
    return -whole(model.weight), exact


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_64_micro_batches_are_summed_in_fp32(world_size: int) -> None:
    summed, exact = launch(_sixty_four, world_size)[0]
    assert summed.dtype == torch.float32
    assert torch.equal(summed.double(), exact)
    assert not torch.equal(exact.bfloat16().double(), exact)
