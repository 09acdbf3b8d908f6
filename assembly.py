"""Build the parts of a run from its configuration: model, plan, schedule, optimizer, data, checkpoints."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from data.opening import agreed, check_kind, data_facts, open_run_data, phase_schedule, yardsticks
from data.schedule import check_phases
from exchange.in_run import Exports, check_exports, last_exportable
from megatron_fp4.checkpoint.checkpointer import Checkpointer
from megatron_fp4.checkpoint.config_diff import run_identity
from megatron_fp4.checkpoint.find import check_resume
from megatron_fp4.checkpoint.initialize import check_initialization
from megatron_fp4.checks.precision import refuse_nothing_quantized, validate_precision
from megatron_fp4.config.checks import validate
from megatron_fp4.config.compose import ConfigError, compose_config
from megatron_fp4.config.launcher import place_in_run
from megatron_fp4.config.precision_schema import PrecisionConfig
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.run_folder import check_baseline
from megatron_fp4.logging.run_log import RunLog
from megatron_fp4.measure.machine import memory_size
from megatron_fp4.parallel.data_parallel import apply_data_parallel
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.backend_support import BackendChoice, agreed_backend, check_sizes, choose_backend
from megatron_fp4.precision.plan import Plan, build_plan, recipes_in
from megatron_fp4.precision.recipe import Recipe, recipe_from_config
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.switch import PrecisionController, PrecisionSwitch
from megatron_fp4.runtime.exit_codes import is_users_to_mend
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.training.autotuning import KernelChoices
from megatron_fp4.training.cuda_graphs import GraphsChoice, MicroBatchGraphs, choose_graphs
from megatron_fp4.training.nonfinite_guard import NonFiniteGuard
from megatron_fp4.training.optimizer import build_optimizer
from megatron_fp4.training.schedule import WSDSchedule
from megatron_fp4.training.spikes import SpikeGuard
from models.execution import Execution
from models.hybrid import HybridModel, build_model
from models.initialization import initialize
from models.pattern import (
    agreed_execution,
    check_exceptions,
    check_model,
    check_size,
    choose_execution,
    linear_shapes,
    shared_by_tensor_ranks,
)
from run_parts import Run

CONFIGS = Path(__file__).resolve().parent / "configs"


def configure(overrides: list[str]) -> Config:
    """The configuration, checked. Raises ConfigError."""
    config = compose_config(overrides, CONFIGS)
    # A dry run plans for machines that are not here.
    device_type = "cuda" if torch.cuda.is_available() or config.run.dry else "cpu"
    check(config, world_size(), device_type)
    check_initialization(config)
    check_exports(config, plans_of(config))
    check_baseline(config)
    if not config.run.dry:  # before any rank waits for others
        execution_of(config)
        graphs_of(config, backend_of(config))
    return config


def check(config: Config, ranks: int, device_type: str) -> None:
    """Raise ConfigError for the first thing in `config` that cannot run on `ranks` ranks.

    device_type: what the machine offers, `cuda` or `cpu`.
    """
    check_model(config.model)
    check_size(config.model)
    validate(config, ranks, device_type, shared_by_tensor_ranks(config.model))
    with configuration_errors():
        check_kind(config.data)
        WSDSchedule.of(config).switch_step(config.precision.switch.when)
    with configuration_errors("data.phases: "):
        check_phases(phase_schedule(config, {}))
    for key, precision in _precisions(config).items():
        check_exceptions(precision.exceptions, key)
        validate_precision(precision, config, device_type, key)
    with configuration_errors():
        plans = _plans(config)
        for (key, precision), plan in zip(_precisions(config).items(), plans, strict=True):
            refuse_nothing_quantized(plan, precision, config, key)
        _with_switch(config, plans)
    check_resume(config)


def plans_of(config: Config) -> tuple[Plan, Plan | None]:
    """The plans before and after the precision switch, None without one.

    Raises ConfigError for exceptions and lists of linears that do not fit the model, or a linear that cannot switch.
    """
    with configuration_errors():
        return _with_switch(config, _plans(config))


def _plans(config: Config) -> list[Plan]:
    """Of each of `_precisions` by itself. Raises ValueError."""
    model, shapes = config.model, linear_shapes(config.model)
    plans = []
    for key, precision in _precisions(config).items():
        recipe, blocks = recipe_from_config(precision), precision.bf16_blocks
        plan = build_plan(shapes, recipe, blocks, model.num_blocks, precision.exceptions, key)
        check_sizes(plan, config.parallel.tensor, config.precision.backend)
        plans.append(plan)
    return plans


def _with_switch(config: Config, plans: list[Plan]) -> tuple[Plan, Plan | None]:
    """What `plans_of` returns, of `_plans`."""
    before, *after = plans
    return before, before.switched(after[0], config.precision.switch.scope) if after else None


def _precisions(config: Config) -> dict[str, PrecisionConfig]:
    """Those before and after the precision switch, by what messages call them."""
    precisions = {"precision": config.precision}
    if config.after_switch is not None:
        precisions[f"precision.switch.target={config.precision.switch.target}: precision"] = config.after_switch
    return precisions


def execution_of(config: Config) -> Execution:
    """Kernels and recomputation on the device that the run will use. Raises ConfigError."""
    return choose_execution(
        config.train, config.model, config.parallel.tensor, device_type_of(config), config.precision.compute_dtype
    )


def backend_of(config: Config) -> BackendChoice:
    """Who quantizes and multiplies on the device that the run will use. Raises ConfigError."""
    return choose_backend(config, device_type_of(config), plans_of(config))


def graphs_of(config: Config, backend: BackendChoice) -> GraphsChoice:
    """Whether micro-batches are replayed. Raises ConfigError."""
    return choose_graphs(config, world_size(), device_type_of(config), backend.name, recipes_of(config))


def recipes_of(config: Config) -> list[Recipe]:
    """Those of the linears, before and after the switch, each once."""
    return recipes_in(plans_of(config))


def world_size() -> int:
    """Ranks of the run: torchrun's WORLD_SIZE, which --check and run.dry=true take from anyone. Raises ConfigError."""
    return place_in_run().world_size


def device_type_of(config: Config) -> str:
    """`cuda` or `cpu`."""
    if config.run.device != "auto":
        return config.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def sharded_model(
    config: Config, mesh: ParallelMesh, clock: StepState, execution: Execution, backend: Backend | None = None
) -> tuple[HybridModel, PrecisionController]:
    """The sharded model on the meta device, and the controller of its linears.

    backend: who quantizes and multiplies; None: the emulation.
    """
    compute_dtype = getattr(torch, config.precision.compute_dtype)
    with torch.device("meta"):
        model = build_model(config.model, mesh, compute_dtype, execution)
    apply_data_parallel(
        model,
        mesh,
        units=list(model.blocks),
        ends=[model.embedding, model.head],
        fp32_units=model.fp32_units(),
        compute_dtype=compute_dtype,
        reshard=config.parallel.reshard,
    )
    plan, plan_after_switch = plans_of(config)
    switch = config.precision.switch
    controller = PrecisionController(
        {name: module.context for name, module in model.linears()},
        plan,
        clock,
        backend=backend,
        switch=PrecisionSwitch(switch, WSDSchedule.of(config).switch_step(switch.when)),
        plan_after_switch=plan_after_switch,
    )
    return model, controller


def initialized_model(
    config: Config, mesh: ParallelMesh, clock: StepState, execution: Execution, backend: BackendChoice
) -> tuple[HybridModel, PrecisionController]:
    """`sharded_model` on the mesh's device with its initial weights."""
    model, controller = sharded_model(config, mesh, clock, execution, backend.open())
    model.to_empty(device=mesh.device)
    initialize(model, config.model, config.run.seed)
    return model, controller


def open_graphs(
    config: Config, mesh: ParallelMesh, model: HybridModel, controller: PrecisionController, warn: Callable[[str], None]
) -> MicroBatchGraphs | None:
    """What replays the micro-batches of `model`, or None where they run eagerly. warn: as `MicroBatchGraphs` has it."""
    if not graphs_of(config, backend_of(config)).used:
        return None
    return MicroBatchGraphs(model, mesh, controller.linears, required=config.train.cuda_graphs == "true", warn=warn)


def build(config: Config, mesh: ParallelMesh, progress: Progress | None = None) -> Run:
    """Build every part. Raises ConfigError for data that cannot be opened or does not fit.

    progress: where the run is to say what it does; None if nobody watches.
    """
    seed = config.run.seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    backend = agreed_backend(backend_of(config))
    execution = agreed_execution(execution_of(config))
    model, controller = initialized_model(config, mesh, StepState(seed=seed), execution, backend)
    with configuration_errors():
        bundle, loader, validation = agreed(lambda: open_run_data(config, mesh), data_facts, is_refusal)
        measures = yardsticks(validation, bundle, mesh, is_refusal)
        # Which data was consumed is in the loader's state; there, a source may join later, here nothing may change.
        tokenizer = bundle.tokenizer and bundle.tokenizer.fingerprint()
        identity = run_identity(config, {"tokenizer": tokenizer})
        optimizer = build_optimizer(model, config.optimizer)
    log = RunLog(config, active=mesh.rank == 0, memory_size=memory_size(mesh.device))
    checkpointer = Checkpointer(
        Path(config.run.dir) / "checkpoints",
        mesh,
        keep=config.checkpoint.keep,
        identity=identity,
        asynchronous=config.checkpoint.asynchronous,
        max_failed_saves=config.checkpoint.max_failed_saves,
        timeout=datetime.timedelta(seconds=config.parallel.timeout_seconds),
    )
    return Run(
        config=config,
        mesh=mesh,
        model=model,
        controller=controller,
        backend=backend,
        schedule=WSDSchedule.of(config),
        optimizer=optimizer,
        bundle=bundle,
        loader=loader,
        validation=validation,
        yardsticks=measures,
        checkpointer=checkpointer,
        exports=Exports(config, log, active=mesh.rank == 0, last=last_exportable(config, plans_of(config))),
        guard=NonFiniteGuard(config.train.max_skipped_steps, config.train.steps),
        spikes=SpikeGuard(config.spikes),
        kernels=KernelChoices(),
        graphs_choice=graphs_of(config, backend),
        graphs=open_graphs(config, mesh, model, controller, log.console.text),
        log=log,
        progress=progress or Progress(),
    )


def is_refusal(error: Exception) -> bool:
    """Whether opening data, plans or checkpoints failed by something that the user has to mend. What a disk or network
    fails at is not."""
    return isinstance(error, ValueError) or (isinstance(error, OSError) and is_users_to_mend(error))


@contextlib.contextmanager
def configuration_errors(prefix: str = "") -> Iterator[None]:
    """What opening data, plans and checkpoints refuses (`is_refusal`) is a ConfigError, not a traceback."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        if not is_refusal(error):
            raise
        raise ConfigError(f"{prefix}{error}") from error


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
