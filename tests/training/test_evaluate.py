from typing import Any

import pytest
import torch

from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.callbacks.validation import evaluate
from tests.training.harness import ToyBatch, alone, toy, toy_batches, train_step

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
    """On several ranks, too: tests/distributed/test_masked_documents.py."""
    with alone() as mesh:
        model, _ = toy(mesh)
        losses = [model(b.tokens, b.targets).item() for b in _sources(mesh)["web"]]
        single = evaluate(model, _sources(mesh), mesh, StepState(0))
        with pytest.raises(ValueError, match="'nothing' has no tokens"):
            evaluate(model, {**_sources(mesh), "nothing": []}, mesh, StepState(0))
    assert list(single) == list(NUM_GLOBAL)
    assert single["web"] == pytest.approx((2 * losses[0] + 2 * losses[1] + losses[2]) / 5, rel=1e-6)


def test_evaluation_does_not_change_training() -> None:
    def train(with_evaluation: bool) -> tuple[list[float], torch.Tensor]:
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
