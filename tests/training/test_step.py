"""A training step: gradients and norms against their definitions, updates, skips; and evaluations. That they are
the same on any mesh: tests/distributed/test_equality.py, test_masked_documents.py."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.callbacks.validation import evaluate
from megatron_fp4.training.optimizer import optimizer_state
from megatron_fp4.training.step import (
    GlobalBatch,
    StepRequests,
    StepResult,
    accumulate,
    clip_gradients,
    squared_norm_share,
    sum_replicated_gradients,
)
from tests.training.harness import ToyBatch, alone, launch, toy, toy_batches, toy_mesh, train_step, whole


class RecordingModel(nn.Module):
    """Records the StepState at every forward."""

    def __init__(self, step_state: StepState) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.step_state = step_state
        self.seen: list[tuple[int, int, int]] = []

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.seen.append((self.step_state.step, self.step_state.micro_batch, self.step_state.weights_version))
        return self.weight * tokens.float().mean()


def test_the_step_state_the_loss_and_the_clipped_update() -> None:
    with alone() as mesh:
        step_state = StepState(seed=0)
        model = RecordingModel(step_state)
        optimizer = torch.optim.SGD([{"params": model.parameters(), "lr_ratio": 3.0}], lr=123.0)
        batches = [ToyBatch(i, torch.tensor([[value]]), torch.tensor([[0]])) for i, value in ((4, 1.0), (6, 5.0))]
        settings: dict[str, Any] = {"lr": 0.5, "requests": StepRequests(stop=True)}
        result = train_step(model, optimizer, batches, mesh, step_state, step=7, clip_norm=2.0, **settings)
    assert (result.loss, result.grad_norm, result.skipped, result.requests) == (3.0, 3.0, False, StepRequests(True))
    assert model.seen == [(7, 4, 0), (7, 6, 0)] and step_state.weights_version == 1
    assert model.weight.item() == pytest.approx(1.0 - 0.5 * 3.0 * 2.0) and model.weight.grad is None


def _host_reads_late_or_early(
    rank: int, clip_norm: float, factor: float
) -> tuple[list[dict[str, Tensor]], list[StepResult]]:
    """Train four steps, of which the third has a finite loss but a gradient that is not finite on rank 1. The update is
    launched before the host reads the numbers, then after it. Returns weights and moments of both, and all results."""
    outcomes, results = [], []
    for accept in (None, lambda loss, norm: True):  # with a function the host decides about updates
        mesh = toy_mesh()
        model, optimizer = toy(mesh)
        step_state = StepState(seed=0)
        for step in range(4):
            poison = None
            if step == 2 and rank == 1:
                poison = model.blocks[0].register_forward_hook(
                    lambda module, inputs, output: output.register_hook(lambda gradient: gradient * factor) and None
                )
            settings: dict[str, Any] = {"step": step, "clip_norm": clip_norm, "accept": accept}
            results.append(train_step(model, optimizer, toy_batches(step, mesh), mesh, step_state, **settings))
            assert all(parameter.grad is None for parameter in model.parameters())
            if poison is not None:
                poison.remove()
        assert step_state.weights_version == 3
        state = {**model.state_dict(), **optimizer_state(model, optimizer)}
        outcomes.append({name: whole(value) for name, value in state.items()})
    return outcomes, results


@pytest.mark.parametrize(("clip_norm", "factor"), [(0.0, math.inf), (0.3, math.nan)])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(clip_norm: float, factor: float) -> None:
    """An update that is launched before the host reads the numbers has the same bits as one after it."""
    for (late, early), results in launch(_host_reads_late_or_early, 2, clip_norm, factor):
        assert [result.skipped for result in results] == [False, False, True, False] * 2
        assert math.isfinite(results[2].loss) and not math.isfinite(results[2].grad_norm)
        assert results[0] == results[4] and results[3] == results[7] and results[3].grad_norm > 0.3
        assert late.keys() == early.keys() and all(torch.equal(late[name], early[name]) for name in late)
        assert all(value == 3 for name, value in late.items() if name.endswith(".step"))


def _sixty_four(rank: int) -> tuple[Tensor, Tensor]:
    """The accumulated gradient of 64 micro-batches of a BF16 model, and the FP64 sum of their single gradients."""
    mesh, step_state = toy_mesh(), StepState(seed=0)
    model, optimizer = toy(mesh, dtype=torch.bfloat16)
    batches = toy_batches(0, mesh, num_global=64)

    def gradient(batches: list[ToyBatch]) -> Tensor:
        accumulate(model, batches, mesh, step_state, global_batch=GlobalBatch(64))
        found = whole(model.head.weight.grad)
        optimizer.zero_grad()
        return found

    return gradient(batches), torch.stack([gradient([batch]) for batch in batches]).double().sum(0)


def test_gradients_of_64_micro_batches_are_summed_in_fp32() -> None:
    summed, exact = launch(_sixty_four, 2)[0]
    assert summed.dtype == torch.float32
    assert torch.allclose(summed.double(), exact, rtol=1e-4, atol=1e-6 * exact.abs().max().item())
    assert not torch.allclose(exact.bfloat16().double(), exact, rtol=1e-4, atol=1e-6 * exact.abs().max().item())


def gradient_norm(parameters: list[nn.Parameter], mesh: Any) -> float:
    total = squared_norm_share(parameters, mesh)
    dist.all_reduce(total)
    return math.sqrt(total.item())


def _parameter(local: Tensor, mesh: Any, placements: list[Any], gradient: float) -> nn.Parameter:
    parameter = nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))
    parameter.grad = DTensor.from_local(torch.full_like(local, gradient), mesh, placements, run_check=False)
    return parameter


def _on_a_grid(rank: int) -> tuple[list[float], list[list[Tensor]]]:
    """On dp 2 x tp 2, with a parameter for each placement: the norms of a gradient of 3s before and after clipping; and
    gradients that differ by rank, summed without and with sequence parallelism."""
    mesh, sequence = toy_mesh(tp_size=2), toy_mesh(tp_size=2, sequence_parallel=True)
    grid, plain = mesh.device_mesh, nn.Parameter(torch.zeros(5))
    plain.grad = torch.full((5,), 3.0)
    parameters = [
        _parameter(torch.zeros(2, 2), grid, [Shard(0), Shard(1)], 3.0),  # 16 elements
        _parameter(torch.zeros(4), grid, [Shard(0), Replicate()], 3.0),  # 8
        _parameter(torch.zeros(3), grid, [Replicate(), Replicate()], 3.0),  # 3
        _parameter(torch.zeros(2), grid["tp"], [Shard(0)], 3.0),  # 4
        _parameter(torch.zeros(2), grid["dp"], [Shard(0)], 3.0),  # 4
        plain,  # 5
        nn.Parameter(torch.zeros(7)),  # no gradient
    ]
    foreign = init_device_mesh("cpu", (4,), mesh_dim_names=("context",))
    with pytest.raises(ValueError, match="lies on the axis context, and the mesh has only dp, tp"):
        squared_norm_share([*parameters, _parameter(torch.zeros(2), foreign, [Shard(0)], 3.0)], mesh)
    norms = [gradient_norm(parameters, mesh)]
    for clip_norm in (1.0, 0.0):
        clip_gradients(parameters, torch.tensor(norms[-1], dtype=torch.float64), clip_norm)
        norms.append(gradient_norm(parameters, mesh))
    added = []
    for over in (mesh, sequence):
        grid = over.device_mesh
        parameters = [
            _parameter(torch.zeros(2), grid, [Shard(0), Replicate()], rank + 1.0),
            _parameter(torch.zeros(2, 2), grid, [Shard(0), Shard(0)], rank + 1.0),
            _parameter(torch.zeros(3), grid["tp"], [Replicate()], rank + 1.0),
        ]
        sum_replicated_gradients(parameters, over)
        added.append([p.grad.to_local() for p in parameters])  # type: ignore[union-attr]
    return norms, added


def test_norms_count_every_element_once_and_replicated_gradients_are_summed_over_tp() -> None:
    for rank, (norms, (apart, summed)) in enumerate(launch(_on_a_grid, 4)):
        assert norms[0] == pytest.approx(3.0 * math.sqrt(40), rel=1e-12)
        assert norms[1] == norms[2] == pytest.approx(1.0, rel=1e-6)
        group = 3.0 if rank < 2 else 7.0  # ranks 0 and 1 are one tensor-parallel group, 2 and 3 the other
        assert [set(g.flatten().tolist()) for g in apart] == [{rank + 1.0}] * 3
        assert [set(g.flatten().tolist()) for g in summed] == [{group}, {rank + 1.0}, {group}]


def test_norms_do_not_overflow_or_underflow_and_clipping_has_the_bits_of_its_definition() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    with alone() as mesh:
        for size in (1e30, 1e-30):
            parameter.grad = torch.full((4,), size)
            assert gradient_norm([parameter], mesh) == pytest.approx(2 * size, rel=1e-6)
        for bad in (math.nan, math.inf):
            parameter.grad = torch.tensor([1.0, bad, 0.0, 0.0])
            assert not math.isfinite(gradient_norm([parameter], mesh))
    parameter, gradient = nn.Parameter(torch.zeros(257)), torch.randn(257) * torch.logspace(-42, 20, 257)
    for clip_norm in (0.0, 1.0, 0.37):
        for norm in (0.3, 1.0, 1.0000001, 1e9, 1e-30):
            parameter.grad = gradient.clone()
            clip_gradients([parameter], torch.tensor(norm, dtype=torch.float64), clip_norm)
            assert torch.equal(parameter.grad, gradient * (clip_norm / norm) if 0 < clip_norm < norm else gradient)


NUM_GLOBAL = {"web": 3, "code": 1, "long": 5}


def _sources(mesh: Any) -> dict[str, list[ToyBatch]]:
    sources = {
        name: toy_batches(100 + number, mesh, num_global=count)
        for number, (name, count) in enumerate(NUM_GLOBAL.items())
    }
    # The last micro-batch of a source may be smaller.
    sources["web"] = [b if b.index < 2 else ToyBatch(2, b.tokens[:1], b.targets[:1]) for b in sources["web"]]
    return sources


def test_the_loss_is_the_mean_over_tokens() -> None:
    with alone() as mesh:
        model, _ = toy(mesh)
        losses = [model(b.tokens, b.targets).item() for b in _sources(mesh)["web"]]
        single = evaluate(model, _sources(mesh), mesh, StepState(0))
        with pytest.raises(ValueError, match="'nothing' has no tokens"):
            evaluate(model, {**_sources(mesh), "nothing": []}, mesh, StepState(0))
    assert list(single) == list(NUM_GLOBAL)
    assert single["web"] == pytest.approx((2 * losses[0] + 2 * losses[1] + losses[2]) / 5, rel=1e-6)


def test_evaluation_does_not_change_training() -> None:
    def train(with_evaluation: bool) -> tuple[list[float], Tensor]:
        model, optimizer = toy(mesh)
        step_state, losses = StepState(0), []
        for step in range(3):
            result = train_step(model, optimizer, toy_batches(step, mesh), mesh, step_state, step=step)
            losses.append(result.loss)
            if with_evaluation:
                step_state.micro_batch = 77
                evaluate(model, _sources(mesh), mesh, step_state)
                assert step_state == StepState(0, step, 77, step + 1)
                assert model.training and model.blocks[0].training
                assert all(parameter in optimizer.state for parameter in model.parameters())
        return losses, local_part(model.head.weight).clone()

    with alone() as mesh:
        plain, watched = train(False), train(True)
        assert plain[0] == watched[0] and torch.equal(plain[1], watched[1])
