"""Build the parts of a run from its configuration: model, plan, schedule, optimizer, data, checkpoints."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data.bundle import DataBundle, open_data
from data.loader import MicroBatchLoader
from data.phases import Phase, PhaseSchedule
from data.samples import SampleSource
from data.validation import ValidationSet
from megatron_fp4.checks.combinations import validate
from megatron_fp4.checks.precision import size_refusal, validate_precision
from megatron_fp4.config.compose import ConfigError, compose_config
from megatron_fp4.config.schema import Config, PrecisionConfig
from megatron_fp4.parallel.data_parallel import apply_data_parallel
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.backend_choice import BackendChoice, agreed_backend, choose_backend
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.precision.linear_call import LinearContext
from megatron_fp4.precision.plan import LinearShape, Plan, apply_plan, build_plan
from megatron_fp4.precision.recipe import recipe_from_config
from megatron_fp4.precision.switch import PrecisionSwitch, switch_step
from megatron_fp4.training.autotuning import PinnedKernels
from megatron_fp4.training.checkpoint import Checkpointer
from megatron_fp4.training.identity import run_identity
from megatron_fp4.training.optimizer import BuiltOptimizer, build_optimizer
from megatron_fp4.training.schedule import WSDSchedule
from models.execution import Execution, agreed_execution, choose_execution
from models.flops import linear_costs
from models.hybrid import HybridModel, build_model
from models.initialization import initialize

CONFIGS = Path(__file__).resolve().parent / "configs"


def configure(overrides: list[str]) -> Config:
    """The configuration, checked. Raises ConfigError."""
    config = compose_config(overrides, CONFIGS)
    # A dry run plans for machines that are not here.
    device_type = "cuda" if torch.cuda.is_available() or config.run.dry else "cpu"
    validate(config, world_size(), device_type)
    if not config.run.dry:
        execution_of(config)
    if config.after_switch is not None:
        key = f"precision.switch.target={config.precision.switch.target}: precision"
        validate_precision(config.after_switch, config, device_type, key)
    plans_of(config)  # before any rank waits for others
    if not config.run.dry:
        backend_of(config)
    return config


def plans_of(config: Config) -> tuple[Plan, Plan | None]:
    """The plans before and after the precision switch, None without one.

    Raises ConfigError for exceptions and lists of linears that do not fit the model, or a linear that cannot switch.
    """
    model, switch = config.model, config.precision.switch
    shapes = [
        LinearShape(linear.name, linear.block, linear.in_features, linear.out_features, model.pattern[linear.block])
        for linear in linear_costs(model)
    ]

    def plan_of(precision: PrecisionConfig, prefix: str = "") -> Plan:
        recipe, blocks = recipe_from_config(precision), precision.bf16_blocks
        try:
            return build_plan(shapes, recipe, blocks, model.num_blocks, precision.exceptions)
        except ValueError as error:
            raise ConfigError(f"{prefix}{error}") from error

    plan = plan_of(config.precision)
    if config.after_switch is None:
        return plan, None
    with configuration_errors():
        after = plan_of(config.after_switch, f"precision.switch.target={switch.target}: ")
        return plan, plan.switched(after, switch.scope)


def execution_of(config: Config) -> Execution:
    """Kernels and recomputation on the device that the run will use. Raises ConfigError."""
    return choose_execution(
        config.train, config.model, config.parallel.tensor, device_type_of(config), config.precision.compute_dtype
    )


def backend_of(config: Config) -> BackendChoice:
    """Who quantizes and multiplies on the device that the run will use. Raises ConfigError."""
    return choose_backend(config, device_type_of(config), size_refusal)


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
    linears: dict[str, LinearContext]
    plan: Plan
    switched_plan: Plan | None
    switch: PrecisionSwitch
    backend: BackendChoice
    schedule: WSDSchedule
    optimizer: BuiltOptimizer
    bundle: DataBundle
    phases: PhaseSchedule
    loader: MicroBatchLoader
    validation: list[ValidationSet]
    checkpointer: Checkpointer
    kernels: PinnedKernels | None = None


def sharded_model(
    config: Config, mesh: ParallelMesh, clock: RunClock, execution: Execution
) -> tuple[HybridModel, dict[str, LinearContext], Plan, Plan | None]:
    """The sharded model on the meta device, the context of its linears, and `plans_of` it."""
    compute_dtype = getattr(torch, config.precision.compute_dtype)
    with torch.device("meta"):
        model = build_model(config.model, mesh, compute_dtype, execution)
    plan, switched_plan = plans_of(config)
    apply_data_parallel(
        model,
        mesh,
        units=list(model.blocks),
        fp32_units=model.fp32_units(),
        compute_dtype=compute_dtype,
        reshard=config.parallel.reshard,
    )
    linears = {name: module.context for name, module in model.linears()}
    apply_plan(linears, plan, clock)
    return model, linears, plan, switched_plan


def build_model_parts(
    config: Config, mesh: ParallelMesh, clock: RunClock
) -> tuple[HybridModel, dict[str, LinearContext], Plan, Plan | None]:
    """`sharded_model` on the mesh's device, initialized, computed by the run's backend."""
    model, linears, plan, switched_plan = sharded_model(config, mesh, clock, execution_of(config))
    apply_plan(linears, plan, clock, backend_of(config).open())
    model.to_empty(device=mesh.device)
    initialize(model, config.model, config.run.seed)
    return model, linears, plan, switched_plan


def build(config: Config, mesh: ParallelMesh) -> Run:
    """Build every part. Raises ConfigError for data that cannot be opened or does not fit."""
    seed = config.run.seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    clock = RunClock(seed=seed)
    backend = agreed_backend(backend_of(config))
    agreed_execution(execution_of(config))
    model, linears, plan, switched_plan = build_model_parts(config, mesh, clock)
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
        # mamba-ssm then has its kernels tuned (training/autotuning.py pins them), instead of taking the smallest ones.
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
        # Read when Inductor is imported, which is later. Without it a reduction's block size may be a matter of timing.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True, warn_only=True)
