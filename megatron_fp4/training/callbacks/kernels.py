"""Use the same configurations of autotuned Triton kernels on all ranks, after a resume, and in the next run; compile
kernels in parallel, and keep them beside the run.

mamba-ssm's kernels are autotuned: the first call with a new key times every configuration (block sizes, warps) and
keeps the fastest. Block sizes decide the order of sums, so the choice changes the last bits of results. Triton can
cache choices on disk (TRITON_CACHE_AUTOTUNING), but not for configurations with a `pre_hook`, which the kernels of the
backward pass have, and Inductor gives each device its own cache folder.

So in every run only the first rank tunes, before the first step, by one forward and backward pass of the scan; all
other ranks use its choices. (Runs that need no determinism do this too: otherwise all ranks of all runs would tune for
minutes in their first step.) The configurations of all kernels are compiled in parallel, by a pass that launches none
of them, and then timed one by one. The keys contain sizes of the model, not of the batch, so validation needs no more.
Choices come, in this order, from

    the checkpoint      `autotuning` in trainer.json
    this machine        a file that earlier runs on such a GPU with these versions made: a second run from step 0
                        makes the same choices
    timing

The first two are used only with the same GPU and versions. A key that appears later is not timed, because each rank
would time it for itself: on every rank and in every run it gets the smallest configuration.

Triton compiles a kernel in about a second when it is first launched, and keeps it in a folder of this machine. The
quantizers' kernels are compiled before the first step, in threads: one linear of each recipe is computed on a GPU that
only notes what is launched. The first rank also copies those that the run uses to `run.dir/kernels`, from where a start
on another machine takes them. Triton's key says which source, options, GPU and version they are of. These files are
code for the GPU alone: Inductor's functions and what launches a kernel on the host are compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import logging
import math
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron_fp4.config.schema import Config
from megatron_fp4.precision.linear import quantized_linear
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization import cuda
from megatron_fp4.runtime.revision import changed_facts
from megatron_fp4.training.trainer import Callback

log = logging.getLogger(__name__)

FOLDER = "kernels"
_COMPILERS = 16
_WARMUP, _TIMED = 5, 25  # ms to time a configuration: with 25 and 100, as by default, a hundred take half a minute
_TOKENS, _FEATURES = 256, 256  # of a linear whose kernels are noted
_PACKAGE = "mamba_ssm"
_KERNELS = "mamba_ssm.ops.triton.ssd_combined"  # imports all kernels of the scan

Key = tuple[Any, ...]
Choices = dict[tuple[str, Key], dict[str, Any]]
"""(kernel's qualified name, tuning key) -> Triton's arguments: block sizes, num_warps, num_stages, ..."""


class Kernels(Callback):
    """Pins the configurations of autotuned kernels before the first kernel runs, and keeps compiled ones."""

    name = "autotuning"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved: Mapping[str, Any] | None = None
        self._pinned = False

    def start(self, done: int) -> None:
        trainer = self.trainer
        trainer.progress.at(0, "compile kernels")
        kept = KeptKernels(Path(trainer.config.run.dir) / FOLDER)
        if cuda.gpu.available(trainer.mesh.device):
            kept.install()
            kept.writes = trainer.log.active
            if trainer.config.precision.compute_dtype == "bfloat16":
                compile_quantizers(trainer.precision.linears.values(), trainer.mesh.device)
            kept.writes = False  # tuning compiles many kernels that are not used
        trainer.progress.at(0, "tune kernels")
        if mixers := trainer.model.autotuned_mixers():
            self._pin(mixers, done)
        kept.writes = trainer.log.active
        for kernel in live_autotuners().values():  # forget what is compiled: what is used is looked up, and so kept
            while not hasattr(kernel, "device_caches"):
                kernel = kernel.fn
            kernel.device_caches.clear()

    def _pin(self, mixers: Iterable[Any], done: int) -> None:
        trainer = self.trainer
        whole = trainer.config.train.sequence_length
        lengths = (span.sequence_length or whole for span in trainer.data.phases.spans)
        rehearse = rehearsal(mixers, trainer.config, lengths, trainer.mesh.device)
        lines, self._pinned = pin_kernels(rehearse, self._saved, self._folder), True
        if done and self._saved is None:
            lines = ["kernels: the checkpoint has no record of its kernel configurations", *lines]
        for line in lines:
            trainer.log.console.text(line)

    def state_dict(self) -> Any:
        return record_here() if self._pinned else None

    def load_state_dict(self, state: Any) -> None:
        self._saved = state


class _NotingGPU(cuda.NvidiaGPU):
    """Notes what is launched, and launches nothing, so that results are undefined."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: dict[Any, tuple[cuda.Kernel, tuple[Any, ...], dict[str, Any]]] = {}

    def start(
        self, kernel: cuda.Kernel, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        types = tuple(getattr(argument, "dtype", None) for argument in arguments)
        self.launched[kernel, types, tuple(constants.items())] = kernel, arguments, constants


def compile_quantizers(linears: Iterable[LinearContext], device: torch.device) -> None:
    """Compile the quantizers' kernels of these linears in threads. A collective, because ranks share maxima.

    A kernel that fails here, or is not known here, is compiled when it is first launched.
    """
    mode = importlib.import_module("triton").AsyncCompileMode
    gpu, alike = _NotingGPU(), dict[Any, LinearContext]()
    for linear in linears:
        shared, ours = linear.sharding, linear.backend.name != "transformer_engine"
        if linear.recipe.quantized and ours and not linear.parts:
            alike.setdefault((linear.recipe, linear.keeps_input, shared.in_tokens, shared.out_tokens), linear)
    try:
        with cuda.other_gpu(gpu):
            for linear in alike.values():
                _compute(linear, device)
    except Exception as error:  # a start must not fail because of this
        log.warning("some kernels are compiled when they are first launched: %r", error)
    workers = min(len(os.sched_getaffinity(0)), _COMPILERS)
    with ThreadPoolExecutor(workers) as executor, mode(executor, ignore_errors=True):
        compiled = [cuda.compiled_ahead(*launch) for launch in gpu.launched.values()]
    _load([[kernel] for kernel in compiled], workers, device)


def _compute(linear: LinearContext, device: torch.device) -> None:
    context = replace(linear, step_state=StepState(seed=0), weight_cache=None, probe=None, watcher=None)
    x = torch.zeros(_TOKENS, _FEATURES, dtype=torch.bfloat16, device=device, requires_grad=True)
    w = torch.zeros(linear.sharding.num_groups * _FEATURES, _FEATURES, device=device, requires_grad=True)
    y = quantized_linear(x, w, context)
    torch.autograd.grad(y, (x, w), torch.zeros_like(y))


def _load(groups: Iterable[Iterable[Any]], workers: int, device: torch.device | int) -> None:
    """Load compiled kernels in `workers` threads, and let Triton compile the C function that launches each. Kernels of
    a group have the same function, so one thread loads them. An error comes again when a kernel is launched."""

    def load(group: Iterable[Any]) -> None:
        with torch.cuda.device(device):
            for kernel in group:
                with contextlib.suppress(Exception):
                    getattr(kernel.result(True) if hasattr(kernel, "result") else kernel, "run", None)

    with ThreadPoolExecutor(workers) as executor:
        list(executor.map(load, groups))


class KeptKernels:
    """Copies of compiled Triton kernels in `folder`, a zip file each, whose checksums a reader compares. They are taken
    from there if this machine's folder lacks them. writes: whether this process adds those that it uses, until that
    fails."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.writes, self._failed = folder, False, False

    def install(self) -> None:
        kept, cache = self, importlib.import_module("triton.runtime.cache")

        class Manager(cache.FileCacheManager):  # type: ignore[misc, name-defined]
            """Triton's folder on this machine, and beside it the run's."""

            def get_group(self, filename: str) -> dict[str, str] | None:
                group = super().get_group(filename)
                if group:
                    kept.add(self.key, group)
                elif contents := kept.take(self.key):
                    group = {name: self.put(content, name) for name, content in contents.items()}
                    super().put_group(filename, group)
                return group

            def put_group(self, filename: str, group: dict[str, str]) -> Any:
                kept.add(self.key, group)
                return super().put_group(filename, group)

        cache.knobs.cache.manager_class = Manager

    def take(self, key: str) -> dict[str, bytes]:
        """The files of a kernel by name; empty if there is none, or if it is damaged."""
        try:
            with zipfile.ZipFile(self.folder / f"{key}.zip") as archive:
                return {name: archive.read(name) for name in archive.namelist() if _is_gpu_code(name)}
        except Exception:  # a damaged file may raise anything
            return {}

    def add(self, key: str, group: Mapping[str, str]) -> None:
        """Keep a kernel, if this process writes. group: its files by name. If that fails, the next start compiles."""
        path = self.folder / f"{key}.zip"
        if not self.writes or self._failed or path.exists():
            return
        temporary = path.with_suffix(".tmp")
        try:
            self.folder.mkdir(exist_ok=True)
            with zipfile.ZipFile(temporary, "w") as archive:
                for name in filter(_is_gpu_code, group):
                    archive.write(group[name], name)
            os.replace(temporary, path)
        except OSError as error:
            self._failed = True
            log.warning("compiled kernels are not kept in %s: %s", self.folder, error)


def _is_gpu_code(name: str) -> bool:
    return name == Path(name).name and name.endswith((".cubin", ".json"))


def rehearsal(
    mixers: Iterable[Any], config: Config, lengths: Iterable[int], device: torch.device
) -> Callable[[], None]:
    """A function for `pin_kernels` that runs the autotuned kernels of `mixers` for each of the `lengths`."""
    train, dtype = config.train, getattr(torch, config.precision.compute_dtype)
    different, masked = tuple(dict.fromkeys(lengths)), config.data.documents == "masked"

    def rehearse() -> None:
        for mixer in mixers:
            for length in different:
                rows = train.micro_batch_size * train.sequence_length // length
                mixer.rehearse(rows, length, dtype, device, masked)

    return rehearse


def pin_kernels(rehearse: Callable[[], object], saved: Mapping[str, Any] | None, machine_folder: Path) -> list[str]:
    """Fix the configurations of mamba-ssm's kernels on all ranks. A collective, before the first kernel runs. Returns
    lines that say where the choices came from.

    rehearse: runs every kernel of the model once, on the first rank, which tunes a kernel without a known choice.
    saved: the record in the checkpoint, if there is one. machine_folder: for the files of earlier runs.

    Raises RuntimeError on a rank whose kernels do not have a configuration that the first rank chose.
    """
    importlib.import_module(_KERNELS)
    autotuners = live_autotuners()
    for autotuner in autotuners.values():
        # Undo what an earlier run of this process left.
        autotuner.__dict__.pop("prune_configs", None)
        autotuner.cache.clear()
    chosen: list[Any] = [None, None]
    if dist.get_rank() == 0:
        lines = _choose(rehearse, autotuners, saved, machine_folder)
        chosen = [choices_of(autotuners), lines]
    dist.broadcast_object_list(chosen)
    choices, lines = chosen
    if refused := apply_choices(choices, autotuners):
        raise RuntimeError(f"rank {dist.get_rank()} has other kernels than the first rank: {'; '.join(refused)}")
    for name, autotuner in autotuners.items():
        autotuner.prune_configs = functools.partial(_smallest_instead, name, autotuner)
    return list(lines)


def _choose(
    rehearse: Callable[[], object], autotuners: Mapping[str, Any], saved: Mapping[str, Any] | None, machine_folder: Path
) -> list[str]:
    """Put known choices into this process's `autotuners`, and tune the others; returns lines about it."""
    lines, environment = list[str](), environment_here()
    name = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16]
    machine_file = machine_folder / f"{name}.json"
    # The checkpoint's choices come last, so they win.
    for place, record in ((str(machine_file), read_record(machine_file)), ("the checkpoint", saved)):
        if record is None:
            continue
        there = record["environment"]
        if there == environment:
            lines += [f"kernels: not as in {place}: {line}" for line in apply_choices(choices_in(record), autotuners)]
            continue
        differing = "; ".join(f"{n} {here} instead of {other}" for n, other, here in changed_facts(there, environment))
        lines.append(f"kernels: not as in {place}, which is of another environment: {differing}")
    known, began = choices_of(autotuners).keys(), time.perf_counter()
    testing = sys.modules.get("triton.testing")
    for autotuner in autotuners.values():
        if testing is not None:
            autotuner.do_bench = functools.partial(testing.do_bench, warmup=_WARMUP, rep=_TIMED)
    _compile_configurations(rehearse, autotuners)
    rehearse()
    tuned = {tuning: config for tuning, config in choices_of(autotuners).items() if tuning not in known}
    if tuned:
        # Another run may have finished tuning meanwhile: its choices count for both.
        kept = choices_in(read_record(machine_file) or record_of(environment, {}))
        apply_choices({tuning: config for tuning, config in kept.items() if tuning in tuned}, autotuners)
        try:
            machine_folder.mkdir(parents=True, exist_ok=True)
            # Not the checkpoint's choices: these include the smallest configurations of late keys.
            record = record_of(environment, {**tuned, **kept})
            temporary = machine_folder / f"{name}.{os.getpid()}.tmp"
            temporary.write_text(json.dumps(record, indent=1) + "\n")
            os.replace(temporary, machine_file)
        except OSError as error:
            lines.append(f"kernels: the next run will tune again, because {machine_file} cannot be written: {error}")
    seconds = time.perf_counter() - began
    return [*lines, f"kernels: {len(known)} configurations known, {len(tuned)} tuned, {seconds:.0f} s"]


def environment_here() -> dict[str, str]:
    """What the choices depend on: the GPU, and the versions of the packages that compile kernels."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    versions = {name: str(sys.modules[name].__version__) for name in ("torch", "triton", _PACKAGE)}
    return {
        "gpu": gpu.name,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": str(gpu.multi_processor_count),
        **versions,
    }


def live_autotuners() -> dict[str, Any]:
    """mamba-ssm's autotuned kernels that this process has imported, by the qualified name of their function."""
    triton = sys.modules.get("triton.runtime.autotuner")
    if triton is None:
        return {}
    found = {}
    modules = [m for name, m in [*sys.modules.items()] if name.split(".")[0] == _PACKAGE and isinstance(m, ModuleType)]
    for kernel in [kernel for module in modules for kernel in vars(module).values()]:
        while isinstance(kernel, triton.Heuristics):
            kernel = kernel.fn
        if isinstance(kernel, triton.Autotuner):
            found[f"{kernel.base_fn.__module__}.{kernel.base_fn.__name__}"] = kernel
    return found


def choices_of(autotuners: Mapping[str, Any]) -> Choices:
    """Every choice of the autotuners."""
    return {
        (name, key): config.all_kwargs()
        for name, autotuner in autotuners.items()
        for key, config in autotuner.cache.items()
    }


def apply_choices(choices: Choices, autotuners: Mapping[str, Any]) -> list[str]:
    """Put `choices` into the autotuners; returns a line for each choice that is none of an autotuner's configurations.

    The autotuner's own configuration object is used, because it has the `pre_hook`.
    """
    refused = []
    for (name, key), wanted in choices.items():
        configs = autotuners[name].configs if name in autotuners else ()
        config = next((config for config in configs if config.all_kwargs() == wanted), None)
        if config is None:
            refused.append(f"{name} has no configuration {wanted}")
        else:
            autotuners[name].cache[key] = config
    return refused


class _NotLaunchedError(Exception):
    """Instead of the launch of a kernel that is to be tuned."""


def _compile_configurations(rehearse: Callable[[], object], autotuners: Mapping[str, Any]) -> None:
    """Compile every configuration that `rehearse` will time, and load it. What is not compiled here is compiled when it
    is timed. Kernels with a choice are launched.

    All configurations are in one pool, so that no kernel waits for the slowest configuration of another. The pool has
    all cores, because the other ranks wait.
    """
    mode = getattr(sys.modules.get("triton"), "AsyncCompileMode", None)
    if mode is None:
        return
    compiled, cores = [list[Any]() for _ in autotuners], len(os.sched_getaffinity(0))
    for autotuner, ours in zip(autotuners.values(), compiled, strict=True):
        autotuner.run = functools.partial(_run_if_chosen, autotuner)
        # Triton calls it for a key without a choice.
        autotuner.prune_configs = functools.partial(_compile_instead, autotuner, ours)
    try:
        # The mode is of this thread, so autograd must not start another. An error of a compiler comes again, and is
        # handled, when the configuration is timed.
        with (
            ThreadPoolExecutor(cores) as executor,
            mode(executor, ignore_errors=True),
            torch.autograd.set_multithreading_enabled(False),
        ):
            rehearse()
        _load(compiled, cores, torch.cuda.current_device())
    except Exception as error:
        log.warning("kernels are compiled one by one, because compiling them in parallel failed: %r", error)
    finally:
        for autotuner in autotuners.values():
            del autotuner.run, autotuner.prune_configs


def _run_if_chosen(autotuner: Any, *args: Any, **options: Any) -> Any:
    """Replaces `Autotuner.run`."""
    with contextlib.suppress(_NotLaunchedError):
        return type(autotuner).run(autotuner, *args, **options)


def _compile_instead(autotuner: Any, compiled: list[Any], options: Mapping[str, Any]) -> list[Any]:
    """Replaces `Autotuner.prune_configs`: begins to compile all configurations, and ends the launch."""
    configs = type(autotuner).prune_configs(autotuner, options)
    for config in configs:
        settings = {**options, **config.all_kwargs(), "warmup": True}
        compiled.append(autotuner.fn.run(*autotuner.nargs.values(), **settings))
    autotuner.best_config = configs[0]  # mamba-ssm asks for its block sizes after the launch
    autotuner.nargs = None  # as after a launch: otherwise the tensors of this pass stay in memory during the next
    raise _NotLaunchedError


def _smallest_instead(name: str, autotuner: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Replaces `Autotuner.prune_configs` after tuning: returns one configuration, so that nothing is timed. It has the
    smallest product of block sizes and stages (the first one if several do), and fits any GPU."""

    def cost(config: Any) -> int:
        blocks = (size for name, size in config.kwargs.items() if name.startswith("BLOCK_SIZE"))
        return math.prod(blocks) * (config.num_stages or 1)

    config = min(autotuner.configs, key=cost)
    log.warning("%s was not tuned in advance for these sizes; it uses its smallest configuration, %s", name, config)
    return [config]


def record_here() -> dict[str, Any]:
    """The record of this rank's choices so far, as JSON."""
    return record_of(environment_here(), choices_of(live_autotuners()))


def record_of(environment: Mapping[str, str], choices: Choices) -> dict[str, Any]:
    """The record of choices and their environment, as JSON."""
    listed = [{"kernel": name, "key": list(key), "config": config} for (name, key), config in choices.items()]
    return {"environment": dict(environment), "choices": listed}


def choices_in(record: Mapping[str, Any]) -> Choices:
    """The inverse of `record_of`."""
    return {(choice["kernel"], tuple(choice["key"])): choice["config"] for choice in record["choices"]}


def read_record(path: Path) -> dict[str, Any] | None:
    """The record in a file; None if there is none that can be read."""
    try:
        record = json.loads(path.read_text())
        choices_in(record), record["environment"].items()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s is ignored, because it is no record of kernels: %r", path, error)
        return None
    return dict(record)
