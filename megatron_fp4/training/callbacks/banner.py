"""What a run says before it trains: its model, plan, numerics, batches and data phases."""

from __future__ import annotations

from megatron_fp4.logging import console as show
from megatron_fp4.measure.machine import peak_tflops
from megatron_fp4.precision.backend_support import BackendChoice
from megatron_fp4.precision.switch import PrecisionSwitch
from megatron_fp4.training.build import backend_of, graphs_of
from megatron_fp4.training.optimizer import OPTIMIZER
from megatron_fp4.training.schedule import WSDSchedule
from megatron_fp4.training.trainer import Callback, Trainer


class Banner(Callback):
    """Prints what is about to run."""

    def start(self, done: int) -> None:
        """Unless the run only writes what it lacks."""
        if self.trainer.missing is None:
            introduce_run(self.trainer, done)


def introduce_run(trainer: Trainer, start: int) -> None:
    """Print what is about to run, after the `start` steps that are done."""
    config, models, console = trainer.config, trainer.models, trainer.log.console
    steps, decay_start = config.train.steps, WSDSchedule.of(config).decay_start_step
    kernels = models.kernel_facts(trainer.model, config, trainer.mesh.device.type)
    determinism = kernels.pop("determinism", None)
    facts = {
        **computation_facts(trainer, backend_of(config, models)),
        "precision switch": when_it_switches(trainer.precision.switch, steps),
        "learning rate decays": f"from step {decay_start + 1:,}" if decay_start < steps else "never",
        **kernels,
        "CUDA graphs": graphs_of(config, models),
        "optimizer": OPTIMIZER,
        **({} if determinism is None else {"determinism": determinism}),
    }
    show.introduce(
        console,
        config,
        trainer.precision.plans[0],
        parts=[show.ModelPart(*part) for part in models.parts(trainer.model, config)],
        flops_per_token=models.forward_flops_per_token(config.model, config.train.sequence_length).total,
        phases=phase_rows(trainer),
        num_tokens=trainer.tokens(steps),
        facts=facts,
        world_size=trainer.mesh.world_size,
    )
    console.text("\n".join(trainer.data.summary(config.validation.num_samples)))
    if start:
        console.text(f"resumed after step {start} of {steps}")


def computation_facts(trainer: Trainer, backend: BackendChoice) -> dict[str, str | None]:
    """In what numbers the run computes and who does that, and what its speed is measured against."""
    dtype, device = trainer.config.precision.compute_dtype, trainer.mesh.device
    quantized = any(plan.num_quantized for plan in trainer.precision.plans)
    if backend.name == "emulated":
        who = f"emulated exactly by {'Triton' if device.type == 'cuda' else 'PyTorch'} kernels ({backend.reason})"
    else:
        who = str(backend)
    peak = peak_tflops(device)
    return {
        "compute dtype": f"{dtype} on {device.type}",
        # Without quantization there is nothing to emulate: PyTorch multiplies.
        "quantized GEMMs": who if quantized else None,
        "MFU is relative to": None if peak is None else f"{peak:g} TFLOP/s, this GPU's peak in BF16 (dense)",
    }


def when_it_switches(switch: PrecisionSwitch, steps: int) -> str:
    """When the precision changes in a run of `steps` steps, or changed, in words."""
    if switch.switched_at is not None:
        return f"was before step {switch.switched_at + 1:,}, to {switch.config.target}"
    if switch.config.when == "never":
        return "never"
    if switch.at_step is None:
        return f"when the gradient noise asks for it, to {switch.config.target}"
    if switch.at_step >= steps:
        return f"never: {switch.config.when} is the end of the run"
    return f"before step {switch.at_step + 1:,} ({switch.config.when}), to {switch.config.target}"


def phase_rows(trainer: Trainer) -> list[show.PhaseRow]:
    """The data phases, with what they take from each source."""
    tokens, rows = trainer.config.train.sequence_length, []
    for span, uses in trainer.data.planned_use():
        length = span.sequence_length or tokens
        batch = f"{span.batch_size * tokens // length:,} x {length:,}"
        sources = [show.SourceRow(use.source, use.share, use.epochs, use.epochs_done) for use in uses]
        rows.append(
            show.PhaseRow(span.name, span.first_step + 1, span.end_step, batch, span.num_samples * tokens, sources)
        )
    return rows
