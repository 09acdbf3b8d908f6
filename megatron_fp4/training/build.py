"""From a configuration and a model provider to precision plans, kernels and the sharded model; and the checks before.

Nothing here opens data, writes a file or trains. Code that needs a model without a Trainer starts here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_fp4.config.checks import place_in_run, validate
from megatron_fp4.config.compose import ConfigError
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.data_parallel import apply_data_parallel
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed
from megatron_fp4.precision import support
from megatron_fp4.precision.backend import Backend, OperandRequest
from megatron_fp4.precision.emulated import codes_transpose, side_of
from megatron_fp4.precision.plan import (
    HEAD,
    LinearShape,
    Plan,
    PrecisionController,
    PrecisionSwitch,
    build_plan,
    same_parts,
)
from megatron_fp4.precision.recipe import Recipe, recipe_from_config
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization.cuda import kernels_unavailable
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.rounding import RoundingKey
from megatron_fp4.runtime.errors import error_line, is_user_error
from megatron_fp4.runtime.revision import check_same, made_by, settings_of
from megatron_fp4.training.cuda_graphs import MicroBatchGraphs
from megatron_fp4.training.optimizer import WSDSchedule
from megatron_fp4.training.providers import DataProvider, ModelProvider

T = TypeVar("T")
_ONE_BY_ONE = "one expert after another, for which the host waits for the numbers of their tokens"


def check(config: Config, models: ModelProvider, data: DataProvider, ranks: int, device_type: str) -> None:
    """Raise ConfigError for the first setting of `config` that cannot run on `ranks` ranks.

    device_type: of the machine, `cuda` or `cpu`.
    """
    models.check(config)
    validate(config, ranks, device_type, models.divided_counts(config.model))
    with configuration_errors():
        data.check_kind(config.data)
        WSDSchedule.of(config).switch_step(config.precision.switch.when)
    with configuration_errors("data.phases: "):
        data.phases(config)
    for key, precision in support.precisions_by_key(config).items():
        models.check_exceptions(precision.exceptions, key)
        support.validate_precision(precision, device_type, key)
    support.refuse_sums(config)
    with configuration_errors():
        plans = plans_by_key(config, models)
        for key, precision in support.precisions_by_key(config).items():
            support.refuse_nothing_quantized(plans[key], precision, key)
            support.refuse_emulated_experts(plans[key], config.precision.backend)
    plans_of(config, models)


def plans_by_key(config: Config, models: ModelProvider) -> dict[str, Plan]:
    """The plan of each of `precisions_by_key`, without regard to the scope of the switch, with the same parts of packed
    projections. Raises ValueError."""
    model, shapes, plans = config.model, models.linear_shapes(config.model), {}
    precisions = support.precisions_by_key(config)
    if any(HEAD in exception.names for precision in precisions.values() for exception in precision.exceptions):
        sizes = model.num_blocks, model.hidden_dim, model.vocab_size
        shapes = [*shapes, LinearShape(HEAD, *sizes, input_key="model.hidden_dim", title="the output head")]
    for key, precision in precisions.items():
        recipe, blocks = recipe_from_config(precision), precision.bf16_blocks
        plans[key] = build_plan(shapes, recipe, blocks, model.num_blocks, precision.exceptions, key)
        support.check_sizes(plans[key], config.parallel.tensor, config.precision.backend)
    return dict(zip(plans, same_parts(plans.values()), strict=True))


def plans_of(config: Config, models: ModelProvider) -> tuple[Plan, Plan | None]:
    """The plans before and after the precision switch; the second is None without a switch.

    Raises ConfigError for exceptions and lists of linears that do not fit the model, or a linear that cannot switch.
    """
    with configuration_errors():
        before, *after = plans_by_key(config, models).values()
        return before, before.switched(after[0], config.precision.switch.scope) if after else None


def planned_linears(model: Any, plan: Plan) -> dict[str, Any]:
    """The modules of `model` that the plan gives a recipe: its linears, and its head if the plan has it."""
    in_plan = any(row.linear.name == HEAD for row in plan.rows)
    return {**dict(model.linears()), **({HEAD: model.head} if in_plan else {})}


def execution_of(config: Config, models: ModelProvider) -> Any:
    """Which kernels compute the model on the run's device, and what is recomputed. Raises ConfigError."""
    return models.choose_execution(config, device_type_of(config))


def backend_of(config: Config, models: ModelProvider) -> support.BackendChoice:
    """Which backend quantizes and multiplies on the run's device. Raises ConfigError."""
    return support.choose_backend(config, device_type_of(config), plans_of(config, models))


def why_eager(config: Config, models: ModelProvider) -> str | None:
    """Why the run computes micro-batches eagerly, or None if CUDA graphs replay them. Raises ConfigError."""
    backend, plans = backend_of(config, models).name, plans_of(config, models)
    return graphs_refusal(config, place_in_run().world_size, device_type_of(config), backend, plans)


def graphs_refusal(
    config: Config, ranks: int, device_type: str, backend: str, plans: Iterable[Plan | None] = ()
) -> str | None:
    """Why CUDA graphs do not replay the micro-batches of a run on `ranks` ranks, or None if they do.

    backend: the name of the linears' backend. plans: of the linears.

    Raises ConfigError if `train.cuda_graphs` is `true` and graphs are not possible.
    """
    parallel, wanted = config.parallel, config.train.cuda_graphs
    if wanted == "false":
        return "train.cuda_graphs=false"
    obstacles = {
        f"the run is on {device_type}, and graphs need CUDA": device_type != "cuda",
        f"precision.compute_dtype={config.precision.compute_dtype} has no fused kernels": (
            config.precision.compute_dtype != "bfloat16"
        ),
        "with data.documents=masked the shapes of micro-batches differ": config.data.documents == "masked",
        "train.kernels=torch asks for plain PyTorch": config.train.kernels == "torch",
        f"parallel.expert={parallel.expert} waits for how many tokens each rank gets": parallel.expert > 1,
    }
    if parallel.data_parallel_size(ranks) > 1:
        each = "parallel.reduce_gradients=each reduces gradients in every micro-batch"
        obstacles |= {
            "parallel.reshard=true gathers parameters in every micro-batch": parallel.reshard,
            each: parallel.reduce_gradients == "each",
        }
    refusal = next((why for why, applies in obstacles.items() if applies), None)
    if refusal is None and torch.cuda.is_available():  # a machine without a GPU may plan for one
        refusal = kernels_unavailable(torch.device("cuda", torch.cuda.current_device()))
    linears = dict[tuple[Recipe, bool], None]()
    for plan in (plan for plan in plans if plan is not None):
        emulated = support.emulated_linears(plan, backend)
        for row in plan.rows:
            if (experts := row.linear.experts > 1) and parallel.tensor > 1:
                refusal = refusal or f"parallel.tensor={parallel.tensor} waits for how many tokens its experts get"
            if backend != "transformer_engine" or row.linear.name in emulated:
                linears[row.recipe, experts] = None
            elif experts and row.recipe.quantized:  # for the others it has its own kernels
                refusal = refusal or "Transformer Engine waits for how many tokens each expert gets"
    if config.precision.sums != "fp32" and any(experts for _, experts in linears):
        refusal = refusal or f"precision.sums={config.precision.sums} multiplies {_ONE_BY_ONE}"
    refusal = refusal or next(filter(None, itertools.starmap(operand_without_kernel, linears)), None)
    if refusal is not None and wanted == "true":
        raise ConfigError(f"train.cuda_graphs=true is not possible: {refusal}; leave it at auto")
    return refusal


def operand_without_kernel(recipe: Recipe, experts: bool = False) -> str | None:
    """A line about the first operand of `recipe` that has no fused kernel, or None. PyTorch quantizes such an operand
    with copies from the host, which a CUDA graph cannot capture. experts: the recipe is that of experts, whose kernels
    must take all experts at once, because otherwise the host waits for the number of tokens of each."""
    draws = RoundingKey(0)
    for slot, operand in recipe.operands.items():
        if not operand.quantized or operand.source == "codes":
            continue
        key = draws if operand.drawn else None
        request = OperandRequest(operand, recipe.gemms[slot.gemm].rht, recipe.rht_signs, key, draws, slot)
        along = "rows" if slot.transposed and not codes_transpose(request) else "columns"
        form = format_of(operand.format)
        kernels, tokens_scaled = form.kernels(side_of(request), along), form.scope and slot.tensor != "weight"
        if kernels is None:
            return f"{slot.name} of the recipe {recipe.name} is quantized by PyTorch, not by a kernel"
        if experts and (not form.exact or (tokens_scaled and not kernels.in_segments)):
            verb = "quantizes" if form.exact else "multiplies"
            return f"the recipe {recipe.name} {verb} {_ONE_BY_ONE} ({slot.name})"
    return None


def device_type_of(config: Config) -> str:
    """The device that the run uses, `cuda` or `cpu`."""
    if config.run.device != "auto":
        return config.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def join_ranks(config: Config, models: ModelProvider) -> ParallelMesh:
    """Join the run's other ranks; returns the mesh. A collective. Raises ConfigError on all ranks if they differ in
    anything that makes numbers: configuration, precision plans, kernels, code, libraries, kind of device."""
    device = init_distributed(device_type_of(config), config.parallel.timeout_seconds)
    set_determinism(config.run.deterministic)
    plans = json.dumps([plan and plan.as_dict() for plan in plans_of(config, models)])
    chosen = {
        "precision plan": hashlib.sha256(plans.encode()).hexdigest()[:12],  # may come from a file
        "precision.backend": backend_of(config, models).name,
        "kernels": models.describe_execution(execution_of(config, models), config),
    }
    check_same({**made_by(device), **settings_of(config), **chosen})
    return build_mesh(config.parallel, device)


def sharded_model(
    config: Config,
    models: ModelProvider,
    mesh: ParallelMesh,
    step_state: StepState,
    execution: Any,
    backend: Backend | None = None,
) -> tuple[Any, PrecisionController]:
    """The sharded model on the meta device, and the controller of its linears.

    backend: of the linears; None: the emulation.
    """
    compute_dtype = getattr(torch, config.precision.compute_dtype)
    with torch.device("meta"):
        model: Any = models.build_model(config.model, mesh, compute_dtype, execution)
    apply_data_parallel(
        model,
        mesh,
        units=[*model.blocks, *model.mtp],
        ends=[model.embedding, model.head],
        fp32_units=model.fp32_units(),
        compute_dtype=compute_dtype,
        reshard=config.parallel.reshard,
    )
    plan, plan_after_switch = plans_of(config, models)
    switch = config.precision.switch
    controller = PrecisionController(
        {name: module.context for name, module in planned_linears(model, plan).items()},
        plan,
        step_state,
        backend=backend,
        switch=PrecisionSwitch(switch, WSDSchedule.of(config).switch_step(switch.when)),
        plan_after_switch=plan_after_switch,
    )
    return model, controller


def initialized_model(
    config: Config, models: ModelProvider, mesh: ParallelMesh, step_state: StepState
) -> tuple[Any, PrecisionController]:
    """`sharded_model` with the configuration's kernels and backend, on the mesh's device, with initial weights."""
    execution, backend = execution_of(config, models), backend_of(config, models).open()
    model, controller = sharded_model(config, models, mesh, step_state, execution, backend)
    initialize(model, config, models, mesh)
    return model, controller


def initialize(model: Any, config: Config, models: ModelProvider, mesh: ParallelMesh) -> None:
    """Move a `sharded_model` to the mesh's device and initialize its weights."""
    model.to_empty(device=mesh.device)
    models.initialize(model, config.model, config.run.seed)


def graphs_for(
    config: Config, models: ModelProvider, mesh: ParallelMesh, model: Any, linears: Any, warn: Callable[[str], None]
) -> MicroBatchGraphs | None:
    """The CUDA graphs of `model`'s micro-batches; None if these run eagerly.

    linears: contexts by name. warn: prints a line if a capture fails on the first rank. Other ranks print to stderr.
    """
    if why_eager(config, models) is not None:
        return None
    if mesh.rank:
        warn = functools.partial(print, f"pretrain.py: rank {mesh.rank}:", file=sys.stderr, flush=True)
    return MicroBatchGraphs(model, mesh, linears, required=config.train.cuda_graphs == "true", warn=warn)


def is_refusal(error: Exception) -> bool:
    """Whether the user has to correct this error of data, plans or checkpoints: not a failing disk or network."""
    return isinstance(error, ValueError) or (isinstance(error, OSError) and is_user_error(error))


def open_alike(open_data: Callable[[], T], facts_of: Callable[[T], Mapping[str, str]]) -> T:
    """What `open_data` returns on this rank, after a check that all ranks have the same `facts_of` it. A collective.
    Without it, a rank that lacks a file would hang in training's first collective, and a rank with another version
    would train on it.

    Raises ValueError on all ranks, with rank, host and reason, if `open_data` raised an error with `is_refusal`, and
    ConfigError if facts differ. Any other exception is raised on its rank, and as a RuntimeError on the others.
    """
    failure: Exception | None = None
    try:
        opened = open_data()
    except Exception as error:  # any, because the other ranks must not wait for this one
        failure = error
    refused = failure is None or is_refusal(failure)
    outcomes: list[Any] = [None] * dist.get_world_size()
    problem = None if failure is None else str(failure) or type(failure).__name__
    dist.all_gather_object(outcomes, (problem, refused, socket.gethostname()))
    if failure is not None and (not refused or len({text for text, *_ in outcomes}) == 1):
        raise failure
    if told := [f"rank {rank} (host {host}): {text}" for rank, (text, _, host) in enumerate(outcomes) if text]:
        others = f"; {len(told) - 1} more ranks fail, too" if len(told) > 1 else ""
        kind = ValueError if all(refused for _, refused, _ in outcomes) else RuntimeError
        raise kind(f"the data of {len(told)} of {len(outcomes)} ranks cannot be opened: {told[0]}{others}") from failure
    check_same(facts_of(opened), "Copy the same data to every host")
    return opened


@contextlib.contextmanager
def configuration_errors(prefix: str = "") -> Iterator[None]:
    """Inside, errors that the user has to correct (`is_refusal`) become ConfigErrors: one line, no traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, ConfigError) or not is_refusal(error):
            raise
        raise ConfigError(f"{prefix}{error_line(error)}") from error


def load_data(data: Any, state: Mapping[str, Any], start: int) -> None:
    """Move opened `data` to the position after `start` steps, from a checkpoint's trainer state. Raises ValueError if
    the checkpoint is of other data or batches."""
    data.loader.load_state_dict(state["loader"])
    consumed = data.loader.consumed_samples
    if (expected := data.phases.samples_before(start)) != consumed:
        raise ValueError(
            f"its {start} steps took {consumed} samples, and {expected} in this run; restore "
            "train.global_batch_size and the batch sizes of the phases up to this step"
        )


def when_it_switches(switch: PrecisionSwitch, steps: int) -> str:
    """When the precision switches, or has switched, in a run of `steps` steps."""
    if switch.switched_at is not None:
        return f"was before step {switch.switched_at + 1:,}, to {switch.config.target}"
    if switch.config.when == "never":
        return "never"
    if switch.at_step is None:
        return f"when the gradient noise is too large, to {switch.config.target}"
    if switch.at_step >= steps:
        return f"never: {switch.config.when} is the end of the run"
    return f"before step {switch.at_step + 1:,} ({switch.config.when}), to {switch.config.target}"


def set_determinism(deterministic: bool) -> None:
    """Use deterministic kernels. Where torch has none, it warns."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # mamba-ssm then tunes its kernels (callbacks/kernels.py pins them); without it, it uses the smallest ones.
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
        # Inductor reads it when it is imported, later. Without it, timing may decide a reduction's block size.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True, warn_only=True)
