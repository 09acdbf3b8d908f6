"""Held-out losses, every `validation.interval` steps and after the last one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from megatron_fp4.logging.metrics import last_validation
from megatron_fp4.parallel.data_parallel import gathered_parameters
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.rng import StepState
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.training.providers import MicroBatch
from megatron_fp4.training.step import inputs_of
from megatron_fp4.training.trainer import Callback, Step, is_due

_LAST = "its last validation"


class AtValidation(Callback):
    """A callback that records something at each validation; inference/prompts.py is one too."""

    def record(self, done: int) -> None:
        """Measure and record the model after `done` steps. A collective."""
        raise NotImplementedError

    def start(self, done: int) -> None:
        """Make the last record, if the run was killed after its last step and lacks it."""
        if _LAST in self.trainer.missing:
            self.record(done)

    def after_step(self, step: Step) -> None:
        config = self.trainer.config
        if step.done == config.train.steps or is_due(config.validation.interval, step.done):
            self.record(step.done)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model can run in evaluation mode. Afterwards the mode is as before, and parameters are sharded."""
    was_training = model.training
    model.eval()
    try:
        with gathered_parameters(model):
            yield
    finally:
        model.train(was_training)


class Validation(AtValidation):
    """Measures and records the loss of each held-out set."""

    def lacking(self, done: int) -> list[str]:
        record = last_validation(self.trainer.config.run.dir, done)
        measured = record is not None and record["step"] == done
        return [_LAST] if self.trainer.data.validation and not measured else []

    def record(self, done: int) -> None:
        trainer, data, mesh = self.trainer, self.trainer.data, self.trainer.mesh
        if not data.validation:
            return
        trainer.make_room()
        trainer.progress.at(done, "validation")
        size = trainer.config.train.micro_batch_size
        batches = {each.name: each.batches(size, mesh.batch.rank, mesh.batch.size) for each in data.validation}
        losses = evaluate(trainer.model, batches, mesh, trainer.precision.step_state, trainer.progress)
        bits, mean = data.bits_per_byte(losses), sum(losses.values()) / len(losses)
        record = {"tokens": trainer.tokens(done), "loss": mean, "losses": losses}
        curves = {f"loss/validation_{source}": loss for source, loss in losses.items()} | {"loss/validation": mean}
        curves |= {f"bits_per_byte/{source}": value for source, value in bits.items()}
        trainer.log.metrics.record(done, "validation", record | ({"bits_per_byte": bits} if bits else {}), curves)
        in_bits = {source: f" ({value:.4f} bits/byte)" for source, value in bits.items()}
        each = "  ".join(f"{source} {loss:.4f}{in_bits.get(source, '')}" for source, loss in losses.items())
        trainer.log.console.text(f"validation after step {done}: {each}")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    sources: Mapping[str, Collection[MicroBatch]],
    mesh: ParallelMesh,
    step_state: StepState,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Mean NLL per target that counts, in nats, of each source; the same numbers on all ranks.

    model: called with `step.inputs_of` of a micro-batch. sources: this data-parallel rank's micro-batches of each
    source; the names are in the same order on all ranks, and all micro-batches have documents or none has. Ranks may
    have different numbers of micro-batches, or none; a micro-batch may have fewer rows than the rank's first, not more.
    Micro-batches are read one at a time, so a source may be larger than memory. Sums are FP64. Afterwards mode and
    StepState are as before, and parameters are sharded. progress: learns that this rank is alive.

    Raises ValueError if a source has no targets that count on any rank.
    """
    progress = progress or Progress()
    counts, filler = _common_shape(sources, mesh)
    sums = torch.zeros(len(sources), 2, dtype=torch.float64, device=mesh.device)  # NLL, targets

    def loss_of(batch: MicroBatch) -> torch.Tensor:
        tokens, targets, options = inputs_of(batch, mesh, step_state)
        loss: torch.Tensor = model(tokens, targets, **options)
        return loss

    step, micro_batch = step_state.step, step_state.micro_batch
    with evaluation_mode(model):
        for row, mine, count in zip(sums, sources.values(), counts, strict=True):
            for batch in mine:
                progress.alive()
                num_targets = batch.targets.numel() if batch.num_targets is None else batch.num_targets
                row[0] += loss_of(batch).double() * num_targets
                row[1] += num_targets
            # Every forward pass gathers parameters, so all ranks must run the same number.
            for _ in range(count - len(mine)):
                loss_of(filler)
    step_state.step, step_state.micro_batch = step, micro_batch

    dist.all_reduce(sums, group=mesh.batch.group)
    totals = dict(zip(sources, sums.tolist(), strict=True))
    if empty := [name for name, (_, num_targets) in totals.items() if num_targets == 0]:
        raise ValueError(f"validation source {empty[0]!r} has no tokens that count; give it data or leave it out")
    return {name: nll / num_targets for name, (nll, num_targets) in totals.items()}


def _common_shape(sources: Mapping[str, Collection[MicroBatch]], mesh: ParallelMesh) -> tuple[list[int], MicroBatch]:
    """How many forward passes every rank runs for each source, and the micro-batch for passes that do not count: zeros
    in the shape of the largest, with documents if others have them, because these run other kernels."""
    firsts = [next(iter(mine)) for mine in sources.values() if len(mine)]
    rows, length = (max((batch.tokens.shape[dim] for batch in firsts), default=0) for dim in (0, 1))
    masked = any(batch.documents is not None for batch in firsts)
    agreed = torch.tensor([rows, length, masked, *map(len, sources.values())], device=mesh.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=mesh.batch.group)
    rows, length, masked, *counts = agreed.tolist()
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    documents = tokens.to(torch.int32) if masked else None
    return counts, MicroBatch(0, tokens, tokens, documents, rows if masked else None)
