"""What a run prints and writes about itself: a banner, a record of each step, a summary and a report."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from rich.table import Table

from megatron_fp4.checkpoint.files import folder_name
from megatron_fp4.config.compose import compose_config, to_yaml
from megatron_fp4.config.schema import Config, ModelConfig
from megatron_fp4.logging.console import batch_table, facts_table, make_table, plan_table, with_unit
from megatron_fp4.logging.files import (
    METRICS_FILE,
    PICTURE_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    attempt,
    records_of,
    replace_text,
)
from megatron_fp4.logging.metrics import StepMetrics, finite, last_validation
from megatron_fp4.logging.run_folder import summarized_steps
from megatron_fp4.logging.run_log import goodput_of
from megatron_fp4.precision.plan import Plan
from megatron_fp4.precision.support import emulated_linears
from megatron_fp4.training.build import backend_of, when_it_switches, why_eager
from megatron_fp4.training.optimizer import WSDSchedule, optimizer_name
from megatron_fp4.training.trainer import Callback, Step, Trainer

# Environment variables that a launcher sets for ranks; a command beside the run is not a rank.
_OF_RANKS = re.compile(r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|(ROLE|MASTER|TORCHELASTIC)_\w+")
_MOST_SOURCES = 16  # the most rows of a phase in its table, including one for the rest
# Dense TFLOP/s in BF16 from NVIDIA's data sheets, by words of torch's name for the GPU. The last row that fits counts.
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
    """Prints model, plan, numerics, batches and data phases, unless the run is finished and only lacks files."""

    def start(self, done: int) -> None:
        trainer, config, models = self.trainer, self.trainer.config, self.trainer.models
        if trainer.missing:
            return
        console, plan, steps = trainer.log.console, trainer.precision.plans[0], config.train.steps
        decay_start, eager = WSDSchedule.of(config).decay_start_step, why_eager(config, models)
        flops = models.forward_flops_per_token(config.model, config.train.sequence_length)
        kernels = models.kernel_facts(trainer.model, config, trainer.mesh.device.type)
        determinism = kernels.pop("determinism", None)
        facts = {
            **_recipe_facts(plan),
            "linears quantized": f"{plan.num_quantized} of {len(plan.rows)}",
            "model FLOPs quantized": f"{plan.quantized_flops_per_token / flops:.1%}",
            **_computation_facts(trainer),
            "precision switch": when_it_switches(trainer.precision.switch, steps),
            "learning rate decays": f"from step {decay_start + 1:,}" if decay_start < steps else "never",
            **kernels,
            "CUDA graphs": "forward and backward of a micro-batch are replayed" if eager is None else f"no ({eager})",
            "optimizer": optimizer_name(trainer.optimizer),
            "determinism": determinism,
        }
        parts, active = models.parts(trainer.model, config), models.active_parameters(config.model)
        console.table(model_table(config.model, parts, active, 3 * flops))
        emulated = emulated_linears(plan, backend_of(config, trainer.models).name)
        console.table(plan_table(plan, config.precision.name, emulated))
        console.table(facts_table("Numerics", facts))
        if warning := plan.warning(config.precision.name):
            console.text(warning)
        console.table(batch_table(config.train, config.parallel, trainer.mesh.world_size, trainer.tokens(steps)))
        console.table(phases_table(trainer.data.planned_use(), config.train.sequence_length))
        console.text("\n".join(trainer.data.summary()))
        if done:
            console.text(f"resumed after step {done} of {steps}")


class Records(Callback):
    """Writes a step's loss, speed and position in the data to metrics.jsonl and the console, and says once if no target
    of a step counts."""

    _warned = False

    def start(self, done: int) -> None:
        device = self.trainer.mesh.device
        self._energy = energy_counter(device) if self.trainer.log.active else lambda: None
        self._joules = self._energy()

    def after_step(self, step: Step) -> None:
        trainer = self.trainer
        log, config, device = trainer.log, trainer.config, trainer.mesh.device
        seconds, tokens = time.perf_counter() - step.began, trainer.tokens(step.done) - trainer.tokens(step.index)
        rate, before, self._joules = tokens / seconds, self._joules, self._energy()
        used = None if self._joules is None or before is None else (self._joules - before) * trainer.mesh.world_size
        length = trainer.data.phases.span(step.index).sequence_length or config.train.sequence_length
        flops = trainer.models.training_flops_per_token(config.model, length)
        tflops, peak = flops * rate / trainer.mesh.world_size / 1e12, peak_tflops(device)
        if step.result.loss == step.result.grad_norm == 0 and not self._warned:
            self._warned = True
            log.event(
                step.done,
                "no_targets",
                "WARNING: no target of this step counts, so nothing was learned: with data.boundary_loss=false, "
                "documents of one token have none",
            )
        due = log.active and step.done % config.logging.interval == 0
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
                epochs=trainer.data.epochs(step.done) if due else {},
                mfu=None if peak is None else tflops / peak,
                peak_memory_gib=_peak_memory(device) if due or first else None,
                joules_per_token=None if used is None else used / tokens,
            )
        )


class Summary(Callback):
    """After a finished run has closed its records, prints a table and writes summary.json and loss.png. A disk that
    refuses these files is not an error. export: the command of scripts/convert.py that it proposes, if any."""

    def __init__(self, export: str | None = None) -> None:
        self.export = export

    def lacking(self, done: int) -> list[str]:
        run_dir = Path(self.trainer.config.run.dir)
        drawn = (run_dir / PICTURE_FILE).is_file() or not any(records_of(run_dir, "step"))
        return [*([] if drawn else [PICTURE_FILE]), *([] if summarized_steps(run_dir) == done else [SUMMARY_FILE])]

    def conclude(self) -> None:
        trainer, config, console = self.trainer, self.trainer.config, self.trainer.log.console
        if trainer.mesh.rank != 0:
            return
        from megatron_fp4.logging.pictures import plot_loss  # imports matplotlib, so that no start waits for it

        run_dir, steps, switched_at = Path(config.run.dir), config.train.steps, trainer.precision.switch.switched_at
        facts: dict[str, Any] = {
            "steps": steps,
            "tokens": trainer.tokens(steps),
            "precision switched before step": None if switched_at is None else switched_at + 1,
        }
        last = attempt("the last validation", lambda: last_validation(run_dir, steps))
        measured = last["losses"] if last is not None and last["step"] == steps else {}
        losses = {name: math.nan if loss is None else loss for name, loss in measured.items()}
        bits_per_byte = trainer.data.bits_per_byte(losses)
        for name, loss in losses.items():
            entropy = trainer.data.unigram_entropy[name]
            facts[f"validation loss, {name} (nats)"] = round(loss, 4)
            if name in bits_per_byte:
                facts[f"validation loss, {name} (bits per byte)"] = round(bits_per_byte[name], 4)
            facts[f"unigram entropy, {name} (nats)"] = round(entropy, 4)
            facts[f"below unigram entropy, {name} (nats)"] = round(entropy - loss, 4)
        if (run_dir / "exports" / folder_name(steps)).is_dir():
            facts["exported as"] = f"exports/{folder_name(steps)}"
        steps_of = records_of(run_dir, "step")
        used = attempt("the energy", lambda: [of["joules_per_token"] for of in steps_of if of.get("joules_per_token")])
        if used:
            facts["energy of the GPUs (J per token)"] = round(sum(used) / len(used), 4)
        if goodput := attempt("the goodput", lambda: goodput_of(records_of(run_dir))):
            facts["goodput"] = goodput
        text = json.dumps(finite({"finished": True, **facts}), indent=1, allow_nan=False) + "\n"
        attempt(str(run_dir / PICTURE_FILE), lambda: plot_loss(run_dir))
        # Last, because summary.json means that the run is finished.
        attempt(str(run_dir / SUMMARY_FILE), lambda: replace_text(run_dir / SUMMARY_FILE, text))
        names = (METRICS_FILE, PICTURE_FILE, "config.yaml", "plan.yaml", SUMMARY_FILE, "checkpoints", "exports")
        files = f"{run_dir}: {', '.join(name for name in names if (run_dir / name).exists())}"
        console.table(facts_table("Finished", {**facts, "files": files}))
        console.text("\n    ".join(["What to do next:", *next_steps(config, self.export)]))


def next_steps(config: Config, export: str | None) -> list[str]:
    """Commands to run after a finished run, as one types them in the current folder. export: as in `Summary`."""
    run_dir = Path(config.run.dir)
    run, exported = (shlex.quote(text) for text in (str(run_dir), os.path.join("exported", run_dir.resolve().name)))
    if config.data.cache_dir:
        run = f"--trust-config {run}"  # commands do not open the paths that a configuration names, except with it
    commands = [("convert", f"{export} {run} {exported}")] if export else []
    if config.data.kind == "builtin" or config.data.tokenizer is not None:
        prompt = shlex.quote((config.validation.prompts or ["Once"])[0])
        commands.insert(0, ("generate", f"{run} --prompt {prompt}"))
    others = [
        path.parent
        for path in sorted(run_dir.resolve().parent.glob(f"*/{SUMMARY_FILE}"), key=lambda path: -path.stat().st_mtime)
        if path.parent != run_dir.resolve() and summarized_steps(path.parent) == config.train.steps
    ]
    if others:
        other = str(others[0]) if run_dir.is_absolute() else os.path.relpath(others[0])
        commands.append(("compare", f"runs {shlex.quote(other)} {shlex.quote(str(run_dir))}"))
    return [as_typed(name, arguments) for name, arguments in commands]


def script(name: str) -> Path:
    """The file of a command of scripts/, in a checkout or an installed package."""
    package = Path(__file__).resolve().parents[2]
    rooms = package / "rooms"
    return (rooms if rooms.is_dir() else package.parent) / "scripts" / f"{name}.py"


def as_typed(name: str, arguments: str) -> str:
    """A command of scripts/ as one types it in the current folder, for a checkout or an installed package."""
    path = script(name)
    if path.parents[1].name == "rooms":
        return f"megatron-fp4 {name} {arguments}"
    return f"python {shlex.quote(os.path.relpath(path))} {arguments}"


def start_script(path: Path, arguments: Sequence[str], output: IO[bytes] | int) -> subprocess.Popen[bytes]:
    """Start a command of scripts/ beside the run: with the lowest priority, without a GPU or a launcher's environment
    variables, in the run's own working directory, because its configuration may have relative paths. Raises OSError.

    output: for stdout and stderr, as in `subprocess.Popen`.
    """
    environment = {name: value for name, value in os.environ.items() if not _OF_RANKS.fullmatch(name)}
    return subprocess.Popen(
        [sys.executable, str(path), *arguments, "--beside", str(os.getpid())],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # the run alone handles signals from the terminal
    )


class LiveReport(Callback):
    """Rewrites report.html every `minutes` while the run trains, in a process beside the first rank; no step waits."""

    def __init__(self, minutes: float) -> None:
        self._seconds, self._began = 60 * minutes, time.monotonic()
        self._writer: subprocess.Popen[bytes] | None = None

    def after_step(self, step: Step) -> None:
        is_writing = self._writer is not None and self._writer.poll() is None
        if not self.trainer.log.active or is_writing or time.monotonic() - self._began < self._seconds:
            return
        self._began, run_dir = time.monotonic(), Path(self.trainer.config.run.dir)
        self._writer = attempt(
            str(run_dir / REPORT_FILE),
            lambda: start_script(script("report"), [str(run_dir.absolute())], subprocess.DEVNULL),
        )

    def close(self) -> None:
        if self._writer is not None and self._writer.poll() is None:
            self._writer.kill()
            self._writer.wait()


def report(trainer: Trainer, configs: Path) -> None:
    """Write report.html of a finished run, on the first rank, unless `logging.report` is false or nothing is new. The
    other ranks do not wait for it, and a failure is only logged."""
    config, path = trainer.config, Path(trainer.config.run.dir) / REPORT_FILE
    if not (trainer.log.active and config.logging.report) or (path.exists() and not trainer.log.opened):
        return

    def write() -> Path:
        from megatron_fp4.logging.page import write_report  # imports matplotlib, so that no start waits for it

        defaults = yaml.safe_load(to_yaml(compose_config([], configs)))
        return write_report([config.run.dir], defaults=defaults)

    if attempt(str(path), write) is not None:
        trainer.log.console.text(f"all of it on one page: {path}")


def _computation_facts(trainer: Trainer) -> dict[str, str | None]:
    backend, device = backend_of(trainer.config, trainer.models), trainer.mesh.device
    multiplied_by, peak = str(backend), peak_tflops(device)
    if backend.name == "emulated":
        kernels = "Triton" if device.type == "cuda" else "PyTorch"
        multiplied_by = f"emulated exactly by {kernels} kernels ({backend.reason})"
    quantized = any(plan.num_quantized for plan in trainer.precision.plans)
    return {
        "compute dtype": dtype_fact(trainer.config.precision.compute_dtype, device.type),
        "quantized GEMMs": multiplied_by if quantized else None,
        "MFU is relative to": None if peak is None else f"{peak:g} TFLOP/s, this GPU's peak in BF16 (dense)",
    }


def dtype_fact(dtype: str, device_type: str) -> str:
    """What the run computes in, and what is faster where PyTorch has no instructions for BF16 products."""
    fact = f"{dtype} on {device_type}"
    if fact == "bfloat16 on cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        fact += ", slow without AVX-512; precision.compute_dtype=float32 takes a tenth of the time"
    return fact


def _recipe_facts(plan: Plan) -> dict[str, str]:
    """The operands of the GEMMs of each quantized recipe of the plan; with the recipe's name if there are several."""
    names = plan.short_names
    recipes = [recipe for recipe in names if recipe.quantized] or list(names)
    gemms = [(names[recipe], *line.partition(": ")) for recipe in recipes for line in recipe.describe()]
    return {gemm if len(recipes) == 1 else f"{name}, {gemm}": value for name, gemm, _, value in gemms}


def model_table(
    model: ModelConfig, parts: Sequence[tuple[str, int, int]], active: int, flops_per_token: float
) -> Table:
    """The kinds of parts of the model. parts: name, number, and the parameters of all of this kind. active: the
    parameters that a token uses. flops_per_token: model FLOPs of forward and backward together."""
    total = sum(parameters for _, _, parameters in parts)
    rows = [(name, str(count), f"{own:,}", f"{own / total:.1%}") for name, count, own in parts]
    used = f" ({active:,} of them active)" if active < total else ""
    title = f"Model {model.name}: {total:,} parameters{used}, {with_unit(flops_per_token, 'FLOP')} per token"
    return make_table(title, ["part", "count>", "parameters>", "share>"], rows, model.pattern)


def phases_table(planned: Iterable[tuple[Any, Sequence[Any]]], length: int) -> Table:
    """The data phases, and what they take from each source. Of more than `_MOST_SOURCES`, those with the most epochs.

    planned: each phase's span, and the shares and epochs of its sources. length: tokens of a sample.
    """
    rows: list[Sequence[str]] = []
    for span, sources in planned:
        steps = f"{span.first_step + 1:,}-{span.end_step:,}" if span.end_step > span.first_step else "none"
        own, tokens = span.sequence_length or length, span.num_samples * length
        head: Sequence[str] = (span.name, steps, f"{span.batch_size * length // own:,} x {own:,}")
        shown = sources
        if len(shown) > _MOST_SOURCES:
            shown = sorted(sources, key=lambda use: -use.epochs_done)[: _MOST_SOURCES - 1]
        for use in shown:
            epochs = f"{use.epochs:.3g}", f"{use.epochs_done:.3g}"
            rows.append((*head, use.source, f"{use.share:.2%}", f"{round(tokens * use.share):,}", *epochs))
            head = ("", "", "")
        if rest := len(sources) - len(shown):
            share = sum(use.share for use in sources) - sum(use.share for use in shown)
            rows.append((*head, f"{rest:,} more", f"{share:.2%}", f"{round(tokens * share):,}", "", ""))
        elif not shown:
            rows.append((*head, "", "", "0", "", ""))
    columns = ["phase", "steps>", "batch", "source", "share>", "tokens>", "epochs>", "so far>"]
    return make_table("Data phases", columns, rows, "epochs: in the phase; so far: from the run's start to its end")


def peak_tflops(device: torch.device) -> float | None:
    """The device's peak in BF16, dense, in TFLOP/s; None if it is not known: a CPU, another GPU, a part of a GPU
    (MIG)."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """`peak_tflops` of the GPU with this name, such as `NVIDIA H100 80GB HBM3`."""
    words = re.split(r"[\s-]", name)
    found = [peak for model, peak in _PEAKS.items() if set(model.split()) <= set(words)]
    return found[-1] if found and "MIG" not in words else None


def energy_counter(device: torch.device) -> Callable[[], float | None]:
    """A function that returns the joules that the GPU has taken since its driver was loaded, by NVML's counter; None:
    there is none (a CPU, a part of a GPU, another maker's)."""
    if device.type != "cuda":
        return lambda: None
    try:
        nvml, handle, millijoules = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_ulonglong()
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
        read = nvml.nvmlDeviceGetTotalEnergyConsumption
    except (OSError, AttributeError):
        return lambda: None

    def joules() -> float | None:
        return None if failed or read(handle, ctypes.byref(millijoules)) else millijoules.value / 1e3

    return joules


def _peak_memory(device: torch.device) -> float:
    """The peak memory of this process in GiB: on a GPU, of torch's allocator; on a CPU, resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
