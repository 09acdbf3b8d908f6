"""Train a model: compose the configuration, build the parts, run the loop.

    torchrun --nproc-per-node 8 pretrain.py model=nemotron_h_8b precision=nvfp4 data=my_corpus run.dir=runs/8b
    python pretrain.py --help           every group and key
    python pretrain.py --version
    python pretrain.py --check ...      whether a configuration can run (WORLD_SIZE ranks), without running it
    WORLD_SIZE=736 python pretrain.py ... run.dry=true       what it would need there: memory, messages, time

Started again with the same run.dir it resumes from the newest checkpoint, or says that the run is finished; while
another run is there it waits, and then refuses. Exit codes:
0 finished, or stopped by a signal after saving; 2 the configuration is wrong, in one line on stderr; 1 anything else.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from assembly import (
    CONFIGS,
    Run,
    build,
    configuration_errors,
    configure,
    device_type_of,
    set_determinism,
    sharded_model,
    world_size,
)
from data.cache import default_cache_dir
from data.validation import unigram_entropy
from megatron_fp4 import __version__
from megatron_fp4.config.compose import ConfigError, help_text, to_yaml
from megatron_fp4.config.schema import Config, PrecisionConfig
from megatron_fp4.measure.diagnostics import Diagnostics, diagnostics_scalars
from megatron_fp4.measure.gradient_noise import gradient_noise
from megatron_fp4.measure.nonfinite import NonFiniteGuard, diagnose_nonfinite
from megatron_fp4.parallel.mesh import build_mesh, end_process, init_distributed, leave_distributed
from megatron_fp4.precision import selftest
from megatron_fp4.precision.plan import apply_plan
from megatron_fp4.precision.recheck import Recheck, RecheckError
from megatron_fp4.report import console as show
from megatron_fp4.report.console import RunConsole
from megatron_fp4.report.metrics import MetricsWriter, StepMetrics
from megatron_fp4.report.summary import introduce, summarize
from megatron_fp4.training.autotuning import pin_kernels
from megatron_fp4.training.evaluate import evaluate
from megatron_fp4.training.profiling import ProfileWindow, memory_history
from megatron_fp4.training.run_lock import sole_run
from megatron_fp4.training.signals import StopRequest
from megatron_fp4.training.step import train_step
from models.flops import forward_flops_per_token, parameter_count, training_flops_per_token
from models.mamba2 import Mamba2


def main(arguments: list[str]) -> int:
    """Run pretrain.py with Hydra overrides as `arguments`; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(help_text(CONFIGS))
        return 0
    if "--version" in arguments:
        print(f"megatron_fp4 {__version__}")
        return 0
    check_only = "--check" in arguments
    overrides = [argument for argument in arguments if argument != "--check"]
    try:
        config, target = configure(overrides)
        if check_only:
            return 0
        return print_needs(config, target) if config.run.dry else pretrain(config, target)
    except ConfigError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"pretrain.py: {error}", file=sys.stderr, flush=True)
        return 2
    except RecheckError as error:
        if int(os.environ.get("RANK", 0)) == 0:  # all ranks have the same
            print(f"pretrain.py: {error}", file=sys.stderr, flush=True)
        return 1
    except selftest.SelfTestError as error:
        print(f"pretrain.py: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        leave_distributed()


def print_needs(config: Config, target: PrecisionConfig) -> int:
    """Print what the run would need on WORLD_SIZE ranks, by a dry run; returns the exit code."""
    from scripts.plan_run import plan_run, planned_execution  # which in turn starts this program

    execution = planned_execution(config)
    plan_run(config, world_size(), lambda mesh, clock: sharded_model(config, target, mesh, clock, execution)[:2])
    return 0


def pretrain(config: Config, target: PrecisionConfig) -> int:
    """Build the parts and run them, as the only run in its folder; returns the exit code."""
    device = init_distributed(device_type_of(config), config.parallel.timeout_seconds)
    set_determinism(config.run.deterministic)
    mesh = build_mesh(config.parallel, device)
    logging.basicConfig(level=logging.INFO if mesh.rank == 0 else logging.WARNING, format="%(message)s")
    run = build(config, target, mesh)
    with sole_run(Path(config.run.dir)):
        return run_to_end(run)


def run_to_end(run: Run) -> int:
    """Resume, train, save, summarize; returns the exit code."""
    config, mesh = run.config, run.mesh
    steps, run_dir = config.train.steps, Path(config.run.dir)
    guard = NonFiniteGuard(config.train.max_skipped_steps)
    start, wandb_run_id, saved_kernels = resume(run, guard)
    console = RunConsole(steps, start, config.logging.interval, active=mesh.rank == 0)
    if start >= steps:
        console.text(
            f"{run_dir} is finished: its newest checkpoint is of step {start} of {steps}. Raise train.steps to go on, "
            f"or choose another run.dir."
        )
        return 0

    entropy = {v.name: unigram_entropy(v.target_counts()) for v in run.validation}
    writer = MetricsWriter(
        run_dir,
        resume_step=start,
        tensorboard=config.logging.tensorboard,
        wandb_mode=config.logging.wandb,
        wandb_project=config.logging.wandb_project,
        wandb_run_id=wandb_run_id,
        config=asdict(config),
        active=mesh.rank == 0,
    )
    writer.run(
        start,
        steps=steps,
        decay_start=run.schedule.decay_start_step + 1,
        unigram_entropy=entropy,
        world_size=mesh.world_size,
        optimizer=run.optimizer.name,
        plan=run.plan.as_dict(),
    )
    introduce_run(run, console, start)
    pin_autotuned(run, start, saved_kernels, console)
    test_backend(run, console)
    if mesh.rank == 0:
        (run_dir / "config.yaml").write_text(to_yaml(config))
        (run_dir / "plan.yaml").write_text(yaml.safe_dump(run.plan.as_dict(), sort_keys=False))
    with (
        StopRequest() as stop,
        writer,
        console,
        memory_history(run_dir, active=config.logging.memory_history and mesh.rank == 0),
        ProfileWindow(run_dir, config.logging.profile_steps, mesh.device, active=mesh.rank == 0) as window,
    ):
        stopped_at, last_validation = train(run, start, guard, stop, writer, console, window)
    if stopped_at < steps:
        console.text(f"stopped after step {stopped_at} of {steps} on {stop.received or 'a signal to another rank'}")
        return 0
    if mesh.rank == 0:
        summarize(console, config, run.switch.switched_at, last_validation, entropy)
    return 0


def train(
    run: Run,
    start: int,
    guard: NonFiniteGuard,
    stop: StopRequest,
    writer: MetricsWriter,
    console: RunConsole,
    window: ProfileWindow,
) -> tuple[int, dict[str, float]]:
    """The loop, from `start` steps done to the end or a request to stop; returns steps done and validation losses."""
    config, mesh, switch = run.config, run.mesh, run.switch
    steps, tokens_per_step = config.train.steps, config.train.global_batch_size * config.train.sequence_length
    flops_per_token = training_flops_per_token(config.model, config.train.sequence_length)
    diagnostics = Diagnostics(config.precision.diagnostics.interval, run.linears)
    recheck = Recheck(config.precision.recheck_interval, run.linears, mesh.device)
    losses: dict[str, float] = {}
    for step, micro_batches in enumerate(run.loader.steps(start, steps), start=start):
        began = time.perf_counter()
        if switch.measures(step):
            noise = gradient_noise(
                run.model, micro_batches, mesh, run.clock, run.linears, step=step, reshard=config.parallel.reshard
            )
            switch.record(noise.ratio)
            writer.record(step + 1, "gradient_noise", noise.as_record(), noise.scalars())
            threshold = switch.config.threshold
            console.event(step, f"gradient over quantization noise {noise.ratio:.3f}, switch below {threshold:.3f}")
        if switch.due(step):
            assert run.switched_plan is not None
            apply_plan(run.linears, run.switched_plan, run.clock)
            writer.event(step + 1, "switch", scope=switch.config.scope, target=switch.config.target)
            console.event(step, f"precision switches to {switch.config.target} ({switch.config.scope})")

        with diagnostics.measuring(step), recheck.watching(step), window.step(step):
            result = train_step(
                run.model,
                run.optimizer.optimizer,
                micro_batches,
                mesh,
                run.clock,
                step=step,
                lr=(lr := run.schedule.lr(step, switch.switched_at, switch.config.rewarm_steps)),
                clip_norm=config.optimizer.clip_norm,
                reshard=config.parallel.reshard,
                stop_requested=stop.requested,
            )
        if (rechecked := recheck.collect()) is not None and rechecked.faults:
            writer.event(step + 1, "recheck", linear=rechecked.linear, faults=rechecked.faults)
            if config.precision.recheck_action == "end":
                raise RecheckError(f"{rechecked}; set precision.recheck_action=warn to go on all the same")
            console.event(step + 1, str(rechecked))
        guard.observe(result, step, lambda: diagnose_nonfinite(run.model, micro_batches, mesh, run.clock))  # noqa: B023
        if (record := diagnostics.collect()) is not None:
            writer.record(step + 1, "diagnostics", record, diagnostics_scalars(record))

        done, seconds = step + 1, time.perf_counter() - began
        metrics = StepMetrics(
            step=done,
            tokens=done * tokens_per_step,
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            tokens_per_second=tokens_per_step / seconds,
            model_tflops=flops_per_token * tokens_per_step / seconds / mesh.world_size / 1e12,
            step_time=seconds,
            skipped=result.skipped,
            phase=run.phases.locate(step * config.train.global_batch_size).phase,
            plan=config.precision.name if switch.switched_at is None else f"after the switch to {switch.config.target}",
        )
        writer.step(metrics)
        console.step(metrics)
        if result.skipped:
            writer.event(done, "skip", consecutive=guard.consecutive, total=guard.total)
        if run.validation and (done == steps or due(config.validation.interval, done)):
            losses = validation_losses(run)
            writer.validation(done, metrics.tokens, losses)
            console.validation(done, losses)
        if done == steps or result.stop or due(config.checkpoint.interval, done):
            folder = save(run, done, guard, writer.wandb_run_id)
            writer.event(done, "checkpoint", path=str(folder))
            console.event(done, f"saved {folder}")
        if result.stop and done < steps:
            writer.event(done, "stop", signal=str(stop.received))
            return done, losses
    return steps, losses


def introduce_run(run: Run, console: RunConsole, start: int) -> None:
    """Print what is about to run, from the `start` steps that are done."""
    config, model, switch = run.config, run.model, run.switch
    counts, flops = parameter_count(config.model), forward_flops_per_token(config.model, config.train.sequence_length)
    pattern = config.model.pattern
    kinds = {"M": "Mamba-2 blocks", "-": "FFN blocks", "*": "attention blocks"}
    parts = [show.ModelPart("embedding", 1, counts.embedding)]
    for letter, name in kinds.items():
        if pattern.count(letter):
            own = [b for i, b in enumerate(model.blocks) if pattern[i] == letter]
            parts.append(show.ModelPart(name, len(own), sum(p.numel() for block in own for p in block.parameters())))
    parts += [show.ModelPart("final norm", 1, config.model.hidden_dim), show.ModelPart("head", 1, counts.head)]
    size, tokens = config.train.global_batch_size, run.phases.tokens_per_phase(config.train.sequence_length)
    phases = [
        show.PhaseRow(span.name, span.start // size + 1, span.end // size, tokens[span.name], phase.blend)
        for span, phase in zip(run.phases.spans, config.data.phases, strict=True)
    ]
    when, at_step = config.precision.switch.when, switch.at_step
    facts = {
        "compute dtype, backend": f"{config.precision.compute_dtype}, {run.backend.name} on {run.mesh.device.type}",
        "why this backend": run.backend.reason,
        "switch": when if at_step is None else f"before step {at_step + 1} ({when}), to {switch.config.target}",
        "learning rate decays from step": run.schedule.decay_start_step + 1,
        "kernels": model.execution.describe(pattern),
        "activation checkpointing": model.execution.recompute,
        "optimizer": run.optimizer.name,
    }
    introduce(
        console,
        config,
        run.plan,
        parts=parts,
        flops_per_token=flops.total,
        phases=phases,
        facts=facts,
        world_size=run.mesh.world_size,
    )
    console.text(run.bundle.summary())
    if start:
        console.text(f"resumed after step {start} of {config.train.steps}")


def due(interval: int, done: int) -> bool:
    """Whether something that happens every `interval` steps (0: never) happens after `done` steps."""
    return interval > 0 and done % interval == 0


def validation_losses(run: Run) -> dict[str, float]:
    """Held-out loss per source."""
    size, mesh = run.config.train.micro_batch_size, run.mesh
    batches = {source.name: source.batches(size, mesh.dp_rank, mesh.dp_size) for source in run.validation}
    return evaluate(run.model, batches, mesh, run.clock)


def save(run: Run, step: int, guard: NonFiniteGuard, wandb_run_id: str | None) -> Path:
    """Write the checkpoint of `step` steps done."""
    samples = step * run.config.train.global_batch_size
    plan = run.plan if run.switch.switched_at is None else run.switched_plan
    assert plan is not None
    trainer = {
        "version": __version__,
        "switch": run.switch.state_dict(),
        "skipped": {"consecutive": guard.consecutive, "total": guard.total},
        "loader": run.loader.state_dict(),
        "wandb_run_id": wandb_run_id,
        "plan": plan.as_dict(),
        "config": asdict(run.config),
        "autotuning": run.kernels.record() if run.kernels else None,
    }
    if run.kernels and run.mesh.rank == 0:
        run.kernels.write(Path(run.config.run.dir))
    return run.checkpointer.save(
        step,
        run.model,
        run.optimizer.optimizer,
        trainer,
        consumed_samples=samples,
        consumed_tokens=samples * run.config.train.sequence_length,
    )


def resume(run: Run, guard: NonFiniteGuard) -> tuple[int, str | None, dict[str, Any] | None]:
    """Load a checkpoint if the configuration says so; returns steps done, the run's wandb id, its autotuned kernels.

    Raises ConfigError if the checkpoint is of another run or behind a switch that this one does not have, or going on
    would overwrite checkpoints of run.dir.
    """
    settings, root = run.config.checkpoint, run.checkpointer.root
    with configuration_errors():
        resumed = run.checkpointer.resume(
            settings.resume,
            run.model,
            run.optimizer.optimizer,
            run.clock,
            allow_mismatch=settings.allow_mismatch,
        )
        start = resumed.step if resumed else 0
        if later := run.checkpointer.steps_after(start):
            raise ConfigError(
                f"checkpoint.resume={settings.resume} starts from step {start}, but {root} already has checkpoints up "
                f"to step {max(later)}, which the run would overwrite; choose another run.dir"
            )
        if resumed is None:
            return 0, None, None
        run.loader.load_state_dict(resumed.trainer["loader"], allow_other_data=settings.allow_mismatch)
    run.switch.load_state_dict(resumed.trainer["switch"])
    guard.consecutive, guard.total = resumed.trainer["skipped"]["consecutive"], resumed.trainer["skipped"]["total"]
    if run.switch.switched_at is not None:
        if run.switched_plan is None:
            raise ConfigError(
                f"checkpoint.resume={settings.resume} starts from step {start}, behind the precision switch of its "
                "run, and precision.switch.when=never says no recipe for that; set precision.switch as that run had "
                "it, or take a checkpoint from before"
            )
        apply_plan(run.linears, run.switched_plan, run.clock)
    return start, resumed.trainer["wandb_run_id"], resumed.trainer.get("autotuning")


def pin_autotuned(run: Run, start: int, saved: dict[str, Any] | None, console: RunConsole) -> None:
    """In a deterministic run with autotuned kernels: fix what they use, before the first of them runs."""
    train, mixers = run.config.train, [block.mixer for block in run.model.blocks]
    if not (run.config.run.deterministic and run.model.execution.scan):
        return
    if start and saved is None:
        console.text("kernels: the checkpoint does not say which configurations it was made with")
    scan = next(mixer for mixer in mixers if isinstance(mixer, Mamba2))
    dtype, device = getattr(torch, run.config.precision.compute_dtype), run.mesh.device
    run.kernels = pin_kernels(
        lambda: scan.rehearse_scan(train.micro_batch_size, train.sequence_length, dtype, device),
        saved,
        default_cache_dir() / "autotuning",
    )
    for line in run.kernels.lines:
        console.text(line)
    if run.mesh.rank == 0:
        run.kernels.write(Path(run.config.run.dir))


def test_backend(run: Run, console: RunConsole) -> None:
    """Compare native kernels with the reference, for this run's linears; raises SelfTestError if they differ."""
    if run.backend.name != "emulated":
        plans = [run.plan] if run.switched_plan is None else [run.plan, run.switched_plan]
        train = run.config.train
        cases = selftest.cases_of(plans, run.linears, train.micro_batch_size * train.sequence_length)
        backend = next(iter(run.linears.values())).backend
        console.text(selftest.require(backend, cases, run.mesh.device))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
