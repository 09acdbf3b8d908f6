"""Train a model: compose the configuration, build the parts, run the loop.

    torchrun --nproc-per-node 8 pretrain.py model=nemotron_h_8b precision=nvfp4 data=my_corpus run.dir=runs/8b
    python pretrain.py --help           every group and key
    python pretrain.py --check ...      whether a configuration can run (WORLD_SIZE ranks), without running it
    WORLD_SIZE=736 python pretrain.py ... run.dry=true       what it would need there: memory, messages, time

Started again with the same run.dir it resumes from the newest checkpoint, or says that the run is finished. Exit codes:
0 finished, or stopped by a signal after saving; 2 the configuration is wrong, in one line on stderr; 1 anything else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml

from data.bundle import DataBundle, open_data
from data.loader import MicroBatch, MicroBatchLoader
from data.phases import Phase, PhaseSchedule
from data.samples import SampleSource
from data.validation import ValidationSet, unigram_entropy
from megatron_fp4.backend_choice import BackendChoice, agreed_backend, choose_backend
from megatron_fp4.compose import ConfigError, compose_config, help_text, precision_config, to_yaml
from megatron_fp4.config import Config, PrecisionConfig
from megatron_fp4.parallel.data_parallel import apply_data_parallel
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed
from megatron_fp4.precision import selftest
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.linear import LinearNumerics
from megatron_fp4.precision.plan import LinearShape, Plan, apply_plan, build_plan
from megatron_fp4.precision.recipe import recipe_from_config
from megatron_fp4.precision.switch import PrecisionSwitch, switch_step
from megatron_fp4.training import console as show
from megatron_fp4.training.checkpoint import Checkpointer
from megatron_fp4.training.console import RunConsole
from megatron_fp4.training.diagnostics import Diagnostics, diagnostics_scalars
from megatron_fp4.training.evaluate import evaluate
from megatron_fp4.training.gradient_noise import gradient_noise
from megatron_fp4.training.identity import run_identity
from megatron_fp4.training.metrics import MetricsWriter, StepMetrics
from megatron_fp4.training.nonfinite import NonFiniteGuard, diagnose_nonfinite
from megatron_fp4.training.optimizer import BuiltOptimizer, build_optimizer
from megatron_fp4.training.plot import plot_loss
from megatron_fp4.training.profiling import ProfileWindow, memory_history
from megatron_fp4.training.schedule import WSDSchedule
from megatron_fp4.training.signals import StopRequest
from megatron_fp4.training.step import train_step
from megatron_fp4.validate import validate
from megatron_fp4.validate_precision import validate_precision
from models.execution import Execution, choose_execution
from models.flops import forward_flops_per_token, parameter_count, training_flops_per_token
from models.hybrid import HybridModel, build_model
from models.initialization import initialize

CONFIGS = Path(__file__).resolve().parent / "configs"


def main(arguments: list[str]) -> int:
    """Run pretrain.py with Hydra overrides as `arguments`; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(help_text(CONFIGS))
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
    except selftest.SelfTestError as error:
        print(f"pretrain.py: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def configure(overrides: list[str]) -> tuple[Config, PrecisionConfig]:
    """The configuration, and that of the precision to switch to, both checked. Raises ConfigError."""
    config = compose_config(overrides, CONFIGS)
    # A dry run plans for machines that are not here.
    device_type = "cuda" if torch.cuda.is_available() or config.run.dry else "cpu"
    validate(config, world_size(), device_type)
    if not config.run.dry:
        execution_of(config)
    name = config.precision.switch.target
    target = precision_config(name, config, CONFIGS)
    if config.precision.switch.when != "never":
        validate_precision(target, config, device_type, key=f"precision.switch.target={name}: precision")
    if not config.run.dry:
        backend_of(config, target)
    return config, target


def execution_of(config: Config) -> Execution:
    """Kernels and recomputation on the device that the run will use. Raises ConfigError."""
    return choose_execution(
        config.train, config.model, config.parallel.tensor, device_type_of(config), config.precision.compute_dtype
    )


def backend_of(config: Config, target: PrecisionConfig) -> BackendChoice:
    """Who quantizes and multiplies on the device that the run will use. Raises ConfigError."""
    return choose_backend(config, target, device_type_of(config))


def world_size() -> int:
    """Ranks of the run: torchrun's WORLD_SIZE, which --check and run.dry=true take from anyone."""
    return int(os.environ.get("WORLD_SIZE", 1))


def device_type_of(config: Config) -> str:
    """`cuda` or `cpu`."""
    if config.run.device != "auto":
        return config.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Run:
    """The parts of a run, built and wired."""

    config: Config
    mesh: ParallelMesh
    clock: RunClock
    model: HybridModel
    linears: dict[str, LinearNumerics]
    plan: Plan
    switched_plan: Plan
    switch: PrecisionSwitch
    backend: BackendChoice
    schedule: WSDSchedule
    optimizer: BuiltOptimizer
    bundle: DataBundle
    phases: PhaseSchedule
    loader: MicroBatchLoader
    validation: list[ValidationSet]
    checkpointer: Checkpointer


def sharded_model(
    config: Config, target: PrecisionConfig, mesh: ParallelMesh, clock: RunClock, execution: Execution
) -> tuple[HybridModel, dict[str, LinearNumerics], Plan, Plan]:
    """The sharded model on the meta device, the numerics of its linears, its plans before and after the switch."""
    compute_dtype = getattr(torch, config.precision.compute_dtype)
    with torch.device("meta"):
        model = build_model(config.model, mesh, compute_dtype, execution)
    modules = dict(model.linears())
    shapes = [LinearShape(n, int(n.split(".")[1]), m.in_features, m.out_features) for n, m in modules.items()]

    def plan_of(precision: PrecisionConfig) -> Plan:
        return build_plan(shapes, recipe_from_config(precision), precision.bf16_blocks, config.model.num_blocks)

    with configuration_errors():
        plan = plan_of(config.precision)
        switched_plan = plan.switched(plan_of(target), config.precision.switch.scope)
    apply_data_parallel(
        model,
        mesh,
        units=list(model.blocks),
        fp32_units=model.fp32_units(),
        compute_dtype=compute_dtype,
        reshard=config.parallel.reshard,
    )
    linears = {name: module.numerics for name, module in modules.items()}
    apply_plan(linears, plan, clock)
    return model, linears, plan, switched_plan


def build_model_parts(
    config: Config, target: PrecisionConfig, mesh: ParallelMesh, clock: RunClock
) -> tuple[HybridModel, dict[str, LinearNumerics], Plan, Plan]:
    """`sharded_model` on the mesh's device, initialized, computed by the run's backend."""
    model, linears, plan, switched_plan = sharded_model(config, target, mesh, clock, execution_of(config))
    apply_plan(linears, plan, clock, backend_of(config, target).open())
    model.to_empty(device=mesh.device)
    initialize(model, config.model, config.run.seed)
    return model, linears, plan, switched_plan


def build(config: Config, target: PrecisionConfig, mesh: ParallelMesh) -> Run:
    """Build every part. Raises ConfigError for data that cannot be opened or does not fit."""
    seed = config.run.seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    clock = RunClock(seed=seed)
    backend = agreed_backend(backend_of(config, target))
    model, linears, plan, switched_plan = build_model_parts(config, target, mesh, clock)
    schedule = WSDSchedule(config.schedule, config.optimizer.lr, config.train.steps)
    at_step = switch_step(config.precision.switch.when, config.train.steps, schedule.decay_start_step)

    train, data = config.train, config.data
    with configuration_errors():
        bundle = open_data(
            data.kind,
            config.model.vocab_size,
            data.cache_dir,
            sources=data.sources,
            validation=data.validation,
            tokenizer=data.tokenizer,
            eod_token=data.eod_token,
        )
        phases = PhaseSchedule(
            [Phase(phase.name, phase.fraction, phase.blend) for phase in data.phases],
            train.steps,
            train.global_batch_size,
        )
        sources = {
            name: SampleSource(name, dataset, train.sequence_length, seed, config.model.vocab_size)
            for name, dataset in bundle.train.items()
        }
        loader = MicroBatchLoader(
            phases,
            sources,
            train.micro_batch_size,
            mesh.dp_rank,
            mesh.dp_size,
            data.num_workers,
            pin_memory=mesh.device.type == "cuda",
            prefetch=data.prefetch,
        )
        validation = [
            ValidationSet(name, dataset, train.sequence_length, config.validation.num_samples, config.model.vocab_size)
            for name, dataset in bundle.validation.items()
        ]
        # Which data was consumed is in the loader's state; there, a source may join later, here nothing may change.
        identity = run_identity(config, {"tokenizer": bundle.fingerprint()["tokenizer"]})
        optimizer = build_optimizer(model, config.optimizer)
    return Run(
        config=config,
        mesh=mesh,
        clock=clock,
        model=model,
        linears=linears,
        plan=plan,
        switched_plan=switched_plan,
        switch=PrecisionSwitch(config.precision.switch, at_step),
        backend=backend,
        schedule=schedule,
        optimizer=optimizer,
        bundle=bundle,
        phases=phases,
        loader=loader,
        validation=validation,
        checkpointer=Checkpointer(
            Path(config.run.dir) / "checkpoints", mesh, keep=config.checkpoint.keep, identity=identity
        ),
    )


def print_needs(config: Config, target: PrecisionConfig) -> int:
    """Print what the run would need on WORLD_SIZE ranks, by a dry run; returns the exit code."""
    from scripts.plan_run import plan_run, planned_execution  # which in turn starts this program

    execution = planned_execution(config)
    plan_run(config, world_size(), lambda mesh, clock: sharded_model(config, target, mesh, clock, execution)[:2])
    return 0


def pretrain(config: Config, target: PrecisionConfig) -> int:
    """Build, resume, train, save, summarize; returns the exit code."""
    device = init_distributed(device_type_of(config), config.parallel.timeout_seconds)
    set_determinism(config.run.deterministic)
    mesh = build_mesh(config.parallel, device)
    logging.basicConfig(level=logging.INFO if mesh.rank == 0 else logging.WARNING, format="%(message)s")
    run = build(config, target, mesh)

    steps, run_dir = config.train.steps, Path(config.run.dir)
    guard = NonFiniteGuard(config.train.max_skipped_steps)
    start, wandb_run_id = resume(run, guard)
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
    introduce(run, console, start)
    test_backend(run, console)
    if mesh.rank == 0:
        (run_dir / "config.yaml").write_text(to_yaml(config))
        (run_dir / "plan.yaml").write_text(yaml.safe_dump(run.plan.as_dict(), sort_keys=False))
    with (
        StopRequest() as stop,
        writer,
        console,
        memory_history(run_dir, active=config.logging.memory_history and mesh.rank == 0),
        ProfileWindow(run_dir, config.logging.profile_steps, device, active=mesh.rank == 0) as window,
    ):
        stopped_at, last_validation = train(run, start, guard, stop, writer, console, window)
    if stopped_at < steps:
        console.text(f"stopped after step {stopped_at} of {steps} on {stop.received or 'a signal to another rank'}")
        return 0
    if mesh.rank == 0:
        summarize(run, console, last_validation, entropy)
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
            apply_plan(run.linears, run.switched_plan, run.clock)
            writer.event(step + 1, "switch", scope=switch.config.scope, target=switch.config.target)
            console.event(step, f"precision switches to {switch.config.target} ({switch.config.scope})")

        with diagnostics.measuring(step), window.step(step):
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


def due(interval: int, done: int) -> bool:
    """Whether something that happens every `interval` steps (0: never) happens after `done` steps."""
    return interval > 0 and done % interval == 0


def validation_losses(run: Run) -> dict[str, float]:
    """Held-out loss per source; a window that fills up the last micro-batch of a rank is left out."""
    size, mesh = run.config.train.micro_batch_size, run.mesh

    def batches(source: ValidationSet) -> list[MicroBatch]:
        shares = enumerate(source.batches(size, mesh.dp_rank, mesh.dp_size))
        return [
            MicroBatch(mesh.dp_rank + i * mesh.dp_size, batch.tokens[batch.counted], batch.targets[batch.counted])
            for i, batch in shares
            if batch.counted.any()
        ]

    return evaluate(run.model, {source.name: batches(source) for source in run.validation}, mesh, run.clock)


def save(run: Run, step: int, guard: NonFiniteGuard, wandb_run_id: str | None) -> Path:
    """Write the checkpoint of `step` steps done."""
    samples = step * run.config.train.global_batch_size
    plan = run.plan if run.switch.switched_at is None else run.switched_plan
    trainer = {
        "switch": run.switch.state_dict(),
        "skipped": {"consecutive": guard.consecutive, "total": guard.total},
        "loader": run.loader.state_dict(),
        "wandb_run_id": wandb_run_id,
        "plan": plan.as_dict(),
        "config": asdict(run.config),
    }
    return run.checkpointer.save(
        step,
        run.model,
        run.optimizer.optimizer,
        trainer,
        consumed_samples=samples,
        consumed_tokens=samples * run.config.train.sequence_length,
    )


def resume(run: Run, guard: NonFiniteGuard) -> tuple[int, str | None]:
    """Load a checkpoint if the configuration says so; returns steps done and the run's wandb id.

    Raises ConfigError if the checkpoint is of another run, or going on would overwrite checkpoints of run.dir.
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
            return 0, None
        run.loader.load_state_dict(resumed.trainer["loader"], allow_other_data=settings.allow_mismatch)
    run.switch.load_state_dict(resumed.trainer["switch"])
    guard.consecutive, guard.total = resumed.trainer["skipped"]["consecutive"], resumed.trainer["skipped"]["total"]
    if run.switch.switched_at is not None:
        apply_plan(run.linears, run.switched_plan, run.clock)
    return start, resumed.trainer["wandb_run_id"]


def introduce(run: Run, console: RunConsole, start: int) -> None:
    """Print what is about to run: model, plan, batch arithmetic, phases, data, backend, optimizer."""
    config, plan = run.config, run.plan
    counts, flops = parameter_count(config.model), forward_flops_per_token(config.model, config.train.sequence_length)
    pattern = config.model.pattern
    kinds = {"M": "Mamba-2 blocks", "-": "FFN blocks", "*": "attention blocks"}
    parts = [show.ModelPart("embedding", 1, counts.embedding)]
    for letter, name in kinds.items():
        if pattern.count(letter):
            own = [b for i, b in enumerate(run.model.blocks) if pattern[i] == letter]
            parameters = sum(p.numel() for block in own for p in block.parameters())
            parts.append(show.ModelPart(name, len(own), parameters))
    parts += [show.ModelPart("final norm", 1, config.model.hidden_dim), show.ModelPart("head", 1, counts.head)]
    console.table(show.model_table(config.model.name, pattern, parts, 3 * flops.total))
    rows = [
        show.PlanRow(row.linear.name, (row.linear.out_features, row.linear.in_features), row.recipe.name, row.reason)
        for row in plan.rows
    ]
    console.table(show.plan_table(rows, config.precision.name))
    facts: dict[str, object] = {}
    for gemm in recipe_from_config(config.precision).describe():
        name, _, value = gemm.partition(": ")
        facts[name] = value
    facts["linears quantized"] = f"{plan.num_quantized} of {len(plan.rows)} ({plan.share_of_linears:.1%})"
    facts["model FLOPs quantized"] = f"{plan.quantized_flops_per_token / flops.total:.1%}"
    facts["compute dtype, backend"] = f"{config.precision.compute_dtype}, {run.backend.name} on {run.mesh.device.type}"
    facts["why this backend"] = run.backend.reason
    when, at_step = config.precision.switch.when, run.switch.at_step
    facts["switch"] = when if at_step is None else f"before step {at_step + 1} ({when}), to {run.switch.config.target}"
    facts["learning rate decays from step"] = run.schedule.decay_start_step + 1
    facts["kernels"] = run.model.execution.describe(pattern)
    facts["activation checkpointing"] = run.model.execution.recompute
    facts["optimizer"] = run.optimizer.name
    console.table(show.facts_table("Numerics", facts))
    console.table(show.batch_table(config.train, config.parallel, run.mesh.world_size))
    size, tokens = config.train.global_batch_size, run.phases.tokens_per_phase(config.train.sequence_length)
    console.table(
        show.phases_table(
            [
                show.PhaseRow(span.name, span.start // size + 1, span.end // size, tokens[span.name], phase.blend)
                for span, phase in zip(run.phases.spans, config.data.phases, strict=True)
            ]
        )
    )
    console.text(run.bundle.summary())
    if start:
        console.text(f"resumed after step {start} of {config.train.steps}")


def test_backend(run: Run, console: RunConsole) -> None:
    """Compare native kernels with the reference, for this run's linears; raises SelfTestError if they differ."""
    if run.backend.name == "transformer_engine":
        plans = [run.plan, run.switched_plan] if run.config.precision.switch.when != "never" else [run.plan]
        train = run.config.train
        cases = selftest.cases_of(plans, run.linears, train.micro_batch_size * train.sequence_length)
        backend = next(iter(run.linears.values())).backend
        console.text(selftest.require(backend, cases, run.mesh.device))


def summarize(run: Run, console: RunConsole, losses: dict[str, float], entropy: dict[str, float]) -> None:
    """Print the final table and write summary.json and loss.png."""
    config, run_dir = run.config, Path(run.config.run.dir)
    facts: dict[str, Any] = {
        "steps": config.train.steps,
        "tokens": config.train.steps * config.train.global_batch_size * config.train.sequence_length,
        "precision switched before step": None if run.switch.switched_at is None else run.switch.switched_at + 1,
    }
    for name, loss in losses.items():
        facts[f"validation loss, {name} (nats)"] = round(loss, 4)
        facts[f"unigram entropy, {name} (nats)"] = round(entropy[name], 4)
        facts[f"below unigram entropy, {name}"] = round(entropy[name] - loss, 4)
    plot = plot_loss(run_dir)
    (run_dir / "summary.json").write_text(json.dumps({"finished": True, **facts}, indent=1) + "\n")
    names = ("metrics.jsonl", plot.name, "config.yaml", "plan.yaml", "summary.json", "checkpoints")
    facts["files"] = f"{run_dir}: {', '.join(names)}"
    console.table(show.facts_table("Finished", facts))


@contextlib.contextmanager
def configuration_errors() -> Iterator[None]:
    """What opening data, plans and checkpoints refuses is the user's to mend: a ConfigError, not a traceback."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def set_determinism(deterministic: bool) -> None:
    """Deterministic kernels where torch has them (it warns where not)."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # mamba-ssm then keeps its tuned kernels, chosen once per machine, instead of the smallest ones.
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True, warn_only=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
