"""What a run says and writes of itself: what is about to run, a record of each step, its summary and its report."""

from __future__ import annotations

import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_fp4.checkpoint.files import folder_name
from megatron_fp4.config.compose import compose_config, to_yaml
from megatron_fp4.logging import console as show
from megatron_fp4.logging.files import REPORT_FILE, attempt
from megatron_fp4.logging.metrics import StepMetrics
from megatron_fp4.logging.summary import summarize
from megatron_fp4.precision.plan import PrecisionSwitch
from megatron_fp4.training.build import backend_of, graphs_of
from megatron_fp4.training.optimizer import OPTIMIZER, WSDSchedule
from megatron_fp4.training.trainer import Callback, Step, Trainer

# Dense TFLOP/s in BF16 of NVIDIA's data sheets, by what torch calls the GPU; a later row holds where several fit.
_PEAKS = {
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "H100": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H800": 989.4,
    "H200": 989.4,
    "H200 NVL": 835.0,
    "GH200": 989.4,
    "B200": 2250.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
}


class Banner(Callback):
    """Prints model, plan, numerics, batches and data phases, unless the run only writes what it lacks."""

    def start(self, done: int) -> None:
        """After `done` steps."""
        trainer, config, models = self.trainer, self.trainer.config, self.trainer.models
        if trainer.missing is not None:
            return
        steps, decay_start = config.train.steps, WSDSchedule.of(config).decay_start_step
        kernels = models.kernel_facts(trainer.model, config, trainer.mesh.device.type)
        determinism = kernels.pop("determinism", None)
        facts = {
            **_computation_facts(trainer),
            "precision switch": when_it_switches(trainer.precision.switch, steps),
            "learning rate decays": f"from step {decay_start + 1:,}" if decay_start < steps else "never",
            **kernels,
            "CUDA graphs": graphs_of(config, models),
            "optimizer": OPTIMIZER,
            **({} if determinism is None else {"determinism": determinism}),
        }
        show.introduce(
            trainer.log.console,
            config,
            trainer.precision.plans[0],
            parts=[show.ModelPart(*part) for part in models.parts(trainer.model, config)],
            flops_per_token=models.forward_flops_per_token(config.model, config.train.sequence_length).total,
            phases=_phase_rows(trainer),
            num_tokens=trainer.tokens(steps),
            facts=facts,
            world_size=trainer.mesh.world_size,
        )
        trainer.log.console.text("\n".join(trainer.data.summary(config.validation.num_samples)))
        if done:
            trainer.log.console.text(f"resumed after step {done} of {steps}")


class Records(Callback):
    """Writes what a step did, how fast it was and where it is in the data, to metrics.jsonl and the console."""

    name = "wandb_run_id"

    def after_step(self, step: Step) -> None:
        """After measurements, so that their time is the step's."""
        trainer = self.trainer
        log, config, device = trainer.log, trainer.config, trainer.mesh.device
        seconds = time.perf_counter() - step.began
        rate = (trainer.tokens(step.done) - trainer.tokens(step.index)) / seconds
        length = trainer.data.phases.span(step.index).sequence_length or config.train.sequence_length
        flops = trainer.models.training_flops_per_token(config.model, length)
        tflops, peak = flops * rate / trainer.mesh.world_size / 1e12, peak_tflops(device)
        now_and_then = log.active and step.done % config.logging.interval == 0
        first = log.active and step.index == log.console.start_step
        log.step(
            StepMetrics(
                step=step.done,
                tokens=trainer.tokens(step.done),
                loss=step.result.loss,
                lr=trainer.lr(step.index),
                grad_norm=step.result.grad_norm,
                tokens_per_second=rate,
                model_tflops=tflops,
                step_time=seconds,
                skipped=step.result.skipped,
                phase=trainer.phase(step.index),
                plan=trainer.plan_name,
                data_wait=trainer.data.loader.data_wait,
                epochs=trainer.data.epochs(step.done) if now_and_then else {},
                mfu=None if peak is None else tflops / peak,
                peak_memory_gib=_peak_memory(device) if now_and_then or first else None,
            )
        )

    def state_dict(self) -> Any:
        """The run's id at wandb."""
        return self.trainer.log.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """That of a checkpoint."""
        self.trainer.log.load_state_dict(state)


class Summary(Callback):
    """Writes the table of a finished run, summary.json and loss.png, when the records are closed."""

    def conclude(self) -> None:
        """From the records' last validation, on the first rank."""
        trainer = self.trainer
        if trainer.mesh.rank != 0:
            return
        config, data, steps = trainer.config, trainer.data, trainer.config.train.steps
        losses = trainer.log.losses or (trainer.missing.losses if trainer.missing is not None else {})
        export = Path(config.run.dir) / "exports" / folder_name(steps)
        summarize(
            trainer.log.console,
            config,
            trainer.tokens(steps),
            trainer.precision.switch.switched_at,
            losses,
            data.unigram_entropy,
            data.bits_per_byte(losses),
            export if export.is_dir() else None,
        )


def report(trainer: Trainer, configs: Path) -> None:
    """Write report.html of a run that has finished. The other ranks wait for it no more, and it may fail."""
    path = Path(trainer.config.run.dir) / REPORT_FILE

    def write() -> Path:
        from megatron_fp4.logging.page import write_report  # imports matplotlib, for which no start has to wait

        return write_report([trainer.config.run.dir], defaults=yaml.safe_load(to_yaml(compose_config([], configs))))

    if attempt(str(path), write) is not None:
        trainer.log.console.text(f"all of it on one page: {path}")


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


def _computation_facts(trainer: Trainer) -> dict[str, str | None]:
    """In what numbers the run computes and who does that, and what its speed is measured against."""
    backend, device = backend_of(trainer.config, trainer.models), trainer.mesh.device
    quantized = any(plan.num_quantized for plan in trainer.precision.plans)
    who = str(backend)
    if backend.name == "emulated":
        who = f"emulated exactly by {'Triton' if device.type == 'cuda' else 'PyTorch'} kernels ({backend.reason})"
    peak = peak_tflops(device)
    return {
        "compute dtype": f"{trainer.config.precision.compute_dtype} on {device.type}",
        # Without quantization there is nothing to emulate: PyTorch multiplies.
        "quantized GEMMs": who if quantized else None,
        "MFU is relative to": None if peak is None else f"{peak:g} TFLOP/s, this GPU's peak in BF16 (dense)",
    }


def _phase_rows(trainer: Trainer) -> list[show.PhaseRow]:
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


def peak_tflops(device: torch.device) -> float | None:
    """What `device` could multiply in BF16, dense, in TFLOP/s; None where this is not known: a CPU, another GPU, a part
    of one (MIG)."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """`peak_tflops` of the GPU of this name, such as `NVIDIA H100 80GB HBM3`."""
    words = re.split(r"[\s-]", name)
    found = [peak for model, peak in _PEAKS.items() if set(model.split()) <= set(words)]
    return found[-1] if found and "MIG" not in words else None


def _peak_memory(device: torch.device) -> float:
    """The most memory that this process has had at once since it began, in GiB: what torch's allocator gave out on a
    GPU; on a CPU what was resident, libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size * (1 if sys.platform == "darwin" else 1024) / 2**30
