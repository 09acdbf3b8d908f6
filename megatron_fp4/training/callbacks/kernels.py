"""The same configurations of autotuned Triton kernels on all ranks, after a resume, and in the next run.

mamba-ssm's kernels are autotuned: the first call with a new key times every configuration (block sizes, warps) and
keeps the fastest. Block sizes decide in which order sums are taken, so what a process chooses decides its last bits.
Triton can keep choices on disk (TRITON_CACHE_AUTOTUNING), but not for configurations with a `pre_hook`, which the
kernels of the backward pass have; and Inductor gives each device its own folder for them.

So in every run the first rank alone tunes, before the first step, by one forward and backward pass of the scan; the
others take over what it chose. (Also where no determinism is asked for: left to themselves, all ranks of all runs would
spend minutes of their first step on it.) Configurations are compiled side by side and then timed one by one. The keys
hold sizes of the model, not of the batch: validation needs nothing more. Choices come, in this order, from

    the checkpoint      `autotuning` in trainer.json, also written to run.dir/autotuning.json
    this machine        a file that earlier runs on such a GPU with these versions made: a run started twice
                        from the beginning chooses once
    measuring

The first two count only for the same GPU and versions. A key that comes up later is not compared with others, which
each rank would do for itself: it gets the smallest configuration, whatever rank or run meets it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron_fp4.config.schema import Config
from megatron_fp4.logging.files import attempt
from megatron_fp4.training.trainer import Callback

log = logging.getLogger(__name__)

RECORD_FILE = "autotuning.json"
_COMPILERS = 16
_PACKAGE = "mamba_ssm"
_KERNELS = "mamba_ssm.ops.triton.ssd_combined"  # which imports all that the scan runs

Key = tuple[Any, ...]
Choices = dict[tuple[str, Key], dict[str, Any]]
"""(kernel's qualified name, tuning key) -> Triton's arguments: block sizes, num_warps, num_stages, ..."""


class Kernels(Callback):
    """Pins what autotuned kernels use, before the first of them runs. folder: of this machine, for what earlier runs
    chose."""

    name = "autotuning"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved: Mapping[str, Any] | None = None
        self._pinned = False

    def start(self, done: int) -> None:
        trainer = self.trainer
        trainer.progress.at(0, "tune kernels")
        if not (mixers := trainer.model.autotuned_mixers()):
            return
        whole = trainer.config.train.sequence_length
        lengths = (span.sequence_length or whole for span in trainer.data.phases.spans)
        rehearse = rehearsal(mixers, trainer.config, lengths, trainer.mesh.device)
        lines, self._pinned = pin_kernels(rehearse, self._saved, self._folder), True
        if done and self._saved is None:
            lines = ["kernels: the checkpoint does not say which configurations it was made with", *lines]
        for line in lines:
            trainer.log.console.text(line)
        self.on_checkpoint(done)

    def on_checkpoint(self, done: int) -> None:
        """Replace run.dir/autotuning.json. Checkpoints have it too, so a disk may refuse it."""
        if self._pinned and self.trainer.log.active:
            path = Path(self.trainer.config.run.dir) / RECORD_FILE
            attempt(str(path), lambda: write_record(path, record_here()))

    def state_dict(self) -> Any:
        return record_here() if self._pinned else None

    def load_state_dict(self, state: Any) -> None:
        self._saved = state


def rehearsal(
    mixers: Iterable[Any], config: Config, lengths: Iterable[int], device: torch.device
) -> Callable[[], None]:
    """What `pin_kernels` is to call: the autotuned kernels of `mixers`, once for each sequence length that occurs."""
    train, dtype = config.train, getattr(torch, config.precision.compute_dtype)
    different, masked = tuple(dict.fromkeys(lengths)), config.data.documents == "masked"

    def rehearse() -> None:
        for mixer in mixers:
            for length in different:
                rows = train.micro_batch_size * train.sequence_length // length
                mixer.rehearse(rows, length, dtype, device, masked)

    return rehearse


def pin_kernels(rehearse: Callable[[], object], saved: Mapping[str, Any] | None, machine_folder: Path) -> list[str]:
    """Fix the configurations of mamba-ssm's kernels on all ranks; a collective, before the first kernel runs. Returns
    lines that say where they came from.

    rehearse: runs every kernel of the model once, and so tunes it if its choice is not known; called on the first
    rank. saved: a record from a checkpoint, if there is one. machine_folder: for the files of earlier runs.

    Raises RuntimeError on a rank whose kernels do not have a configuration that the first rank chose.
    """
    importlib.import_module(_KERNELS)
    autotuners = live_autotuners()
    for autotuner in autotuners.values():
        # What an earlier run of this process left; this one shall find what a new process finds.
        autotuner.__dict__.pop("prune_configs", None)
        autotuner.cache.clear()
    chosen: list[Any] = [None, None]
    if dist.get_rank() == 0:
        lines = _choose(rehearse, autotuners, saved, machine_folder)
        chosen = [choices_of(autotuners), lines]
    dist.broadcast_object_list(chosen)
    choices, lines = chosen
    if refused := put_back(choices, autotuners):
        raise RuntimeError(f"rank {dist.get_rank()} has other kernels than the first rank: {'; '.join(refused)}")
    for name, autotuner in autotuners.items():
        autotuner.prune_configs = functools.partial(_smallest_instead, name, autotuner)
    return list(lines)


def _choose(
    rehearse: Callable[[], object], autotuners: Mapping[str, Any], saved: Mapping[str, Any] | None, machine_folder: Path
) -> list[str]:
    """Put known choices into this process's `autotuners` and tune the others; lines that say what was done."""
    lines, environment = list[str](), environment_here()
    name = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16]
    machine_file = machine_folder / f"{name}.json"
    # The checkpoint's last: they win.
    for place, record in ((str(machine_file), read_record(machine_file)), ("the checkpoint", saved)):
        if record is None:
            continue
        there = record["environment"]
        if there == environment:
            lines += [f"kernels: not as in {place}: {line}" for line in put_back(choices_in(record), autotuners)]
            continue
        names = [n for n in sorted(there.keys() | environment.keys()) if environment.get(n) != there.get(n)]
        differing = "; ".join(f"{n} {environment.get(n)} instead of {there.get(n)}" for n in names)
        lines.append(f"kernels: not as in {place}, which is of another environment: {differing}")
    known, began = choices_of(autotuners).keys(), time.perf_counter()
    for autotuner in autotuners.values():
        # An attribute of the object, which Triton calls when it meets a key that it has no choice for.
        autotuner.prune_configs = functools.partial(_compiled_at_once, autotuner)
    rehearse()
    tuned = {tuning: config for tuning, config in choices_of(autotuners).items() if tuning not in known}
    if tuned:
        # Another run may have finished tuning in the meantime: the first to write decides for both.
        kept = choices_in(read_record(machine_file) or record_of(environment, {}))
        put_back({tuning: config for tuning, config in kept.items() if tuning in tuned}, autotuners)
        try:
            machine_folder.mkdir(parents=True, exist_ok=True)
            # No others: among those of a checkpoint are smallest ones, of keys that came late.
            write_record(machine_file, record_of(environment, {**tuned, **kept}))
        except OSError as error:
            lines.append(f"kernels: a new run will tune again, {machine_file} cannot be written: {error}")
    seconds = time.perf_counter() - began
    return [*lines, f"kernels: {len(known)} configurations known, {len(tuned)} tuned, {seconds:.0f} s"]


def environment_here() -> dict[str, str]:
    """What decides which configurations there are and which is fastest: the GPU and the versions that compile."""
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
    """Every choice that the autotuners hold."""
    return {
        (name, key): config.all_kwargs()
        for name, autotuner in autotuners.items()
        for key, config in autotuner.cache.items()
    }


def put_back(choices: Choices, autotuners: Mapping[str, Any]) -> list[str]:
    """Make the autotuners hold `choices`; those that they do not have a configuration for are left, a line each.

    The configuration is one of the autotuner's own, and with it its `pre_hook`.
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


def _compiled_at_once(autotuner: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """In place of `Autotuner.prune_configs`, where one tunes: the same configurations, after compiling all of them."""
    configs: list[Any] = type(autotuner).prune_configs(autotuner, arguments)
    mode = getattr(sys.modules.get("triton"), "AsyncCompileMode", None)
    if mode is not None:  # else each is compiled when its turn to be timed has come
        workers = min(len(os.sched_getaffinity(0)), _COMPILERS)
        # What cannot be compiled is found out again, and distinguished, where it is timed.
        try:
            with ThreadPoolExecutor(workers) as executor, mode(executor, ignore_errors=True):
                for config in configs:
                    settings = {**arguments, **config.all_kwargs(), "warmup": True}
                    autotuner.fn.run(*autotuner.nargs.values(), **settings)
        except Exception as error:
            log.warning("kernels are compiled one by one, because side by side they are not: %r", error)
    return configs


def _smallest_instead(name: str, autotuner: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """In place of `Autotuner.prune_configs`: the only configuration to try, by a rule that knows no clock. It has the
    smallest product of block sizes and stages, the first of equals, and fits any GPU."""

    def cost(config: Any) -> int:
        blocks = (size for name, size in config.kwargs.items() if name.startswith("BLOCK_SIZE"))
        return math.prod(blocks) * (config.num_stages or 1)

    config = min(autotuner.configs, key=cost)
    log.warning("%s was not tuned in advance for these sizes; it uses its smallest configuration, %s", name, config)
    return [config]


def record_here() -> dict[str, Any]:
    """This rank's choices so far, as JSON."""
    return record_of(environment_here(), choices_of(live_autotuners()))


def record_of(environment: Mapping[str, str], choices: Choices) -> dict[str, Any]:
    """Choices and what they are for, as JSON."""
    listed = [{"kernel": name, "key": list(key), "config": config} for (name, key), config in choices.items()]
    return {"environment": dict(environment), "choices": listed}


def choices_in(record: Mapping[str, Any]) -> Choices:
    """The inverse of `record_of`."""
    return {(choice["kernel"], tuple(choice["key"])): choice["config"] for choice in record["choices"]}


def read_record(path: Path) -> dict[str, Any] | None:
    """A record that was written; None if there is none that can be read."""
    try:
        record = json.loads(path.read_text())
        choices_in(record), record["environment"].items()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s is left aside, it is no record of kernels: %r", path, error)
        return None
    return dict(record)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Replace the file of a record. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, path)
