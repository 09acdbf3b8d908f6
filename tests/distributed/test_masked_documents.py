"""Masked documents on every mesh: the results are those of one process, and all targets that count weigh the same."""

import pytest
import torch
from torch.nn import functional as F

from megatron_fp4.measure.diagnosis import diagnose_nonfinite, diagnose_spike
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.callbacks.validation import evaluate
from megatron_fp4.training.step import StepResult, accumulate
from tests.distributed import hybrid
from tests.distributed.hybrid import (
    LAYOUTS,
    ONE,
    RECIPES,
    Layout,
    MicroBatch,
    Result,
    masked_micro_batches,
    sharded_model,
)
from tests.models.builders import relative_error
from tests.training.harness import alone, launch, whole

pytestmark = pytest.mark.slow
STEPS = 3


def trained(rank: int, layout: Layout) -> tuple[Result, dict[str, float]]:
    """The results of training in FP32, and held-out losses of an untrained model, where ranks may have unequal numbers
    of micro-batches. Also checks the diagnoses of a spike and of a step that is not finite."""
    result = hybrid.train(rank, layout, "fp32", STEPS, masked_micro_batches)
    mesh, step_state = layout.mesh(), StepState(seed=0)
    model, batches = sharded_model(layout, mesh, RECIPES["fp32"], step_state), masked_micro_batches(9, mesh)
    first = StepResult(result.losses[0], result.norms[0], skipped=True)
    diagnosis = diagnose_spike(model, masked_micro_batches(0, mesh), mesh, step_state, first)
    assert "as before" in diagnosis and "NOT" not in diagnosis, diagnosis
    assert "every micro-batch is finite" in diagnose_nonfinite(model, batches, mesh, step_state)
    held_out = {
        "all": batches,
        "three": [batch for batch in batches if batch.index < 3],
        "one": batches[:1] if mesh.batch.rank == 0 else [],
    }
    return result, evaluate(model, held_out, mesh, step_state)


@pytest.fixture(scope="module")
def one() -> tuple[Result, dict[str, float]]:
    return launch(trained, 1, ONE)[0]


@pytest.mark.parametrize("name", ["tp2_without_sequence_parallel", "tp2_hsdp2"])
def test_a_mesh_has_the_results_of_one_process(one, name):
    layout, (expected, held_out) = LAYOUTS[name], one
    for result, losses in launch(trained, layout.world, layout):
        assert result.losses == pytest.approx(expected.losses, rel=1e-5)
        assert result.norms == pytest.approx(expected.norms, rel=1e-5)
        for key in expected.gradients:
            assert relative_error(result.gradients[key], expected.gradients[key]) < 1e-5, key
        assert losses == pytest.approx(held_out, rel=1e-5)


def reference(batches: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss over all targets that count, from the logits of all micro-batches at once, and its gradients."""
    tokens, targets, documents = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "targets", "documents")
    )
    with alone():
        model = sharded_model(ONE, ONE.mesh(), RECIPES["fp32"], StepState(seed=11))
        loss = F.cross_entropy(model(tokens, documents=documents).flatten(0, 1), targets.flatten(), ignore_index=-1)
        loss.backward()
        return loss.item(), {name: whole(p.grad) for name, p in model.named_parameters()}


def test_every_target_that_counts_weighs_the_same(one):
    """Compared with PyTorch's `cross_entropy` over the whole global batch."""
    with alone():
        batches = masked_micro_batches(0, ONE.mesh())
    counts = [batch.num_targets for batch in batches]
    assert min(counts) < max(counts) / 2  # so the mean of the means of micro-batches would be another number
    loss, gradients = reference(batches)
    assert one[0].losses[0] == pytest.approx(loss, rel=1e-5)
    clipping = min(1.0, 1.0 / one[0].norms[0])
    for name, gradient in gradients.items():
        assert relative_error(one[0].gradients[name], gradient * clipping) < 1e-5, name


def test_a_batch_without_targets_that_count_has_no_loss_and_no_gradient():
    with alone():
        mesh, step_state = ONE.mesh(), StepState(seed=0)
        model = sharded_model(ONE, mesh, RECIPES["fp32"], step_state)
        some = masked_micro_batches(0, mesh)[0]
        none = MicroBatch(0, some.tokens, torch.full_like(some.targets, -1), some.documents, some.num_documents, 0)
        assert accumulate(model, [none], mesh, step_state) == 0
        assert all((whole(p.grad) == 0).all() for p in model.parameters())
        # Together with another micro-batch it changes nothing.
        loss_of_some = accumulate(model, [some], mesh, step_state)
        assert accumulate(model, [some, none], mesh, step_state) == loss_of_some > 0
