"""What a run says before it trains: what is about to run, what has changed since its checkpoint; and of a dry run, what
it would need."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import yaml

from assembly import CONFIGS, plans_of, sharded_model, world_size
from data.opening import phase_schedule
from data.schedule import planned_use
from data.validation import fewer_windows
from megatron_fp4.checkpoint import config_diff
from megatron_fp4.checkpoint.checkpointer import Resumed
from megatron_fp4.config.compose import compose_config, to_yaml
from megatron_fp4.config.schema import Config
from megatron_fp4.logging import console as show
from megatron_fp4.logging.files import REPORT_FILE, attempt
from megatron_fp4.measure.machine import peak_tflops
from megatron_fp4.precision.switch import PrecisionSwitch
from models.pattern import MIXERS, describe_execution, forward_flops_per_token, parameter_count
from run_parts import Run


def print_needs(config: Config) -> int:
    """Print what the run would need on WORLD_SIZE ranks, by a dry run; returns the exit code."""
    from megatron_fp4.planning.step_time import PlannedPhase
    from megatron_fp4.planning.tables import print_plan  # which loads much that no run needs

    phases = [
        PlannedPhase(
            span.name,
            span.end_step - span.first_step,
            span.batch_size,
            span.sequence_length or config.train.sequence_length,
        )
        for span in phase_schedule(config, {}).spans
    ]
    print_plan(config, world_size(), lambda *parts: sharded_model(config, *parts), phases, plans_of(config))
    return 0


def introduce_run(run: Run, start: int) -> None:
    """Print what is about to run, from the `start` steps that are done."""
    config, model, switch, console = run.config, run.model, run.controller.switch, run.log.console
    counts, flops = parameter_count(config.model), forward_flops_per_token(config.model, config.train.sequence_length)
    pattern, masked = config.model.pattern, config.data.documents == "masked"
    parts = [show.ModelPart("embedding", 1, counts.embedding)]
    for letter, mixer in MIXERS.items():
        if own := [block for block, of in zip(model.blocks, pattern, strict=True) if of == letter]:
            count = sum(p.numel() for block in own for p in block.parameters())
            parts.append(show.ModelPart(f"{mixer.name} blocks", len(own), count))
    parts += [show.ModelPart("final norm", 1, config.model.hidden_dim), show.ModelPart("head", 1, counts.head)]
    decays = run.schedule.decay_start_step < config.train.steps
    facts = {
        **computation_facts(run),
        "precision switch": when_it_switches(switch, config.train.steps),
        "learning rate decays": f"from step {run.schedule.decay_start_step + 1:,}" if decays else "never",
        "kernels": describe_execution(model.execution, pattern, masked),
        "activation checkpointing": model.execution.recompute,
        "CUDA graphs": run.graphs_choice,
        "optimizer": run.optimizer.name,
    }
    if config.run.deterministic and run.mesh.device.type == "cuda":
        facts["determinism"] = "on; run.deterministic=false is faster"
    show.introduce(
        console,
        config,
        run.controller.plans[0],
        parts=parts,
        flops_per_token=flops.total,
        phases=phase_rows(run),
        num_tokens=run.tokens(config.train.steps),
        facts=facts,
        world_size=run.mesh.world_size,
    )
    console.text("\n".join([run.bundle.summary(), *fewer_windows(run.validation, config.validation.num_samples)]))
    if start:
        console.text(f"resumed after step {start} of {config.train.steps}")


def computation_facts(run: Run) -> dict[str, str | None]:
    """In what numbers the run computes and who does that, and what its speed is measured against."""
    dtype, device, backend = run.config.precision.compute_dtype, run.mesh.device, run.backend
    quantized = any(plan.num_quantized for plan in run.controller.plans)
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


def phase_rows(run: Run) -> list[show.PhaseRow]:
    """The data phases, with what they take from each source."""
    tokens, rows = run.config.train.sequence_length, []
    for span, uses in planned_use(run.phases, run.loader.sources):
        length = span.sequence_length or tokens
        batch = f"{span.batch_size * tokens // length:,} x {length:,}"
        sources = [show.SourceRow(use.source, use.share, use.epochs, use.epochs_done) for use in uses]
        steps = span.first_step + 1, span.end_step
        rows.append(show.PhaseRow(span.name, *steps, batch, span.num_samples * tokens, sources))
    return rows


def say_what_differs(run: Run, resumed: Resumed) -> None:
    """Print and record what was damaged, and what has changed of the configuration and the data since the checkpoint
    was made."""
    saved, switch, start = resumed.trainer.get("config", {}), run.controller.switch, resumed.step
    for damage in resumed.damaged:
        line = (
            f"{damage.name} was damaged ({damage.problem}): kept as {damage.moved_to}, training again from step {start}"
        )
        run.log.found("damaged", [line], **asdict(damage))
    if saved and (changes := config_diff.configuration_changes(saved, run.config)):
        lines = config_diff.change_lines(changes) + config_diff.untrained_recipe(changes, run.config, switch, start)
        lines += config_diff.consequences(saved, run.config, switch, start)
        run.log.found("configuration", lines, changes=[change._asdict() for change in changes])
    if run.loader.changes:
        run.log.found("data", run.loader.changes, changes=run.loader.changes)


def sizes(run: Run) -> dict[str, float]:
    """What metrics.jsonl says of the model at each start: its parameters, and which share of its FLOPs is in quantized
    linears before a switch."""
    forward = forward_flops_per_token(run.config.model, run.config.train.sequence_length).total
    quantized = run.controller.plans[0].quantized_flops_per_token
    return {"parameters": parameter_count(run.config.model).total, "quantized_flops": round(quantized / forward, 4)}


def say_all(config: Config, console: show.RunConsole) -> None:
    """Write report.html of a run that has finished: the other ranks wait for it no more, and it may fail."""
    path = Path(config.run.dir) / REPORT_FILE

    def write() -> Path:
        from megatron_fp4.logging.page import write_report  # and with it matplotlib, for which no start has to wait

        return write_report([config.run.dir], defaults=yaml.safe_load(to_yaml(compose_config([], CONFIGS))))

    if attempt(str(path), write) is not None:
        console.text(f"all of it on one page: {path}")
