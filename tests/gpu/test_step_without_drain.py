"""A training step on a GPU: nothing but its own numbers are waited for, after the update, which is as if they were."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.mesh import build_mesh
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import optimizer_state
from tests.training.harness import ToyBatch, toy, toy_batches, train_step, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("alone"),
]


@contextmanager
def no_waiting(active: bool) -> Iterator[None]:
    """PyTorch raises an error where it would wait for the GPU (other than for an event)."""
    torch.cuda.set_sync_debug_mode("error" if active else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def trained(
    accept: Callable[[float, float], bool] | None, clip_norm: float
) -> tuple[dict[str, torch.Tensor], list[tuple[float, float, bool]]]:
    """Weights, moments and step counts after five steps, the fourth of which has a gradient that is not finite."""
    mesh, step_state = build_mesh(ParallelConfig(), torch.device("cuda", 0)), StepState(seed=0)
    (model, optimizer), results = toy(mesh), []
    for step in range(5):
        batches = [ToyBatch(b.index, b.tokens.pin_memory(), b.targets.pin_memory()) for b in toy_batches(step, mesh)]
        poison = None
        if step == 3:
            poison = model.blocks[0].register_forward_hook(
                lambda module, inputs, output: output.register_hook(lambda gradient: gradient * math.inf) and None
            )
        with no_waiting(active=accept is None and step > 1):
            result = train_step(
                model, optimizer, batches, mesh, step_state, step=step, lr=1e-2, clip_norm=clip_norm, accept=accept
            )
        if poison is not None:
            poison.remove()
        results.append((result.loss, result.grad_norm, result.skipped))
    state = {**dict(model.named_parameters()), **optimizer_state(model, optimizer)}
    return {name: whole(value) for name, value in state.items()}, results


@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
def test_the_host_waits_for_nothing_before_the_update_and_every_bit_is_the_same(clip_norm: float) -> None:
    (ahead, results), (after, expected) = trained(None, clip_norm), trained(lambda *_: True, clip_norm)
    assert [skipped for *_, skipped in results] == [False, False, False, True, False]
    assert results[:3] == expected[:3] and results[4] == expected[4]
    assert all(torch.equal(ahead[name], after[name]) for name in after)
    assert all(value == 4 for name, value in ahead.items() if name.endswith(".step"))
