"""Check on this machine, in a minute and without a run, that the backends compute what the recipes define.

    python scripts/prove_backend.py                                      every precision and backend, some shapes
    python scripts/prove_backend.py --page page.md                       also measures times, in ten minutes
    python scripts/prove_backend.py model=nemotron_h_8b parallel.tensor=8     the quantized linears of one of its ranks
    python scripts/prove_backend.py precision.wgrad.rht=0 --precision nvfp4 --backend transformer_engine

Arguments before the options are overrides of pretrain.py. With overrides each linear of the model is computed with its
recipe in the plan; without, some shapes with every recipe of the precision. Beside the comparisons of
precision/verify.py it compares a small linear's operands with those that this machine's CPU makes, and reads from this
machine's GEMMs in which order they add (precision/probes.py). The output is a block of Markdown.

--page also measures GEMMs and quantizers of a linear of the 8B hybrid, a step of a Transformer with eight layers, and
whether CUDA graphs capture a linear.

What this machine cannot run is listed with the reason. Exit codes: 0 everything agrees (times are not judged); 1
something differs; 2 the arguments are wrong.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import datetime
import functools
import gc
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import collect_env

from data import provider as data
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.console import markdown
from megatron_fp4.logging.files import check_place
from megatron_fp4.precision import probes
from megatron_fp4.precision.backend import Backend, first_line
from megatron_fp4.precision.emulated import EMULATED, EmulatedBackend
from megatron_fp4.precision.linear import quantized_linear
from megatron_fp4.precision.operands import LinearCall, LinearContext
from megatron_fp4.precision.recipe import GEMMS, SLOTS, OperandSlot, Recipe, recipe_from_config, rounded_to_nearest
from megatron_fp4.precision.rng import DeviceKeys, StepState
from megatron_fp4.precision.support import BACKENDS, choose_backend, recipes_by_key
from megatron_fp4.precision.verify import Case, Finding, check, difference, makers_of, padded_tensors, sample_tensors
from megatron_fp4.runtime.errors import run_command
from megatron_fp4.runtime.revision import made_by
from megatron_fp4.training.build import check as check_config
from megatron_fp4.training.build import plans_of
from megatron_fp4.training.cuda_graphs import GpuGraph
from models import provider as models
from pretrain import CONFIGS
from scripts.benchmark import median_milliseconds

# (tokens, inputs, outputs, groups of outputs) without overrides: full blocks of every format, and padded outputs.
SHAPES: dict[str, list[tuple[int, int, int, int]]] = {
    "cpu": [(128, 256, 256, 1), (256, 128, 400, 2)],
    "cuda": [(1024, 512, 2048, 1), (512, 2048, 1200, 2), (8192, 4096, 8192, 1)],
}
_CPU_TOKENS = 256

PRECISIONS = ["nvfp4", "nvfp4_4over6_1x16", "mxfp4", "mxfp8", "fp8_block"]


@dataclass
class Proof:
    """The results of one precision on one backend. untested: why it could not be tested, or empty."""

    precision: str
    backend: str
    findings: list[Finding] = field(default_factory=list)
    untested: str = ""

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.fault]

    def row(self) -> list[str]:
        lost = [bool(finding.fault) for finding in self.findings if finding.what == "NaN and inf"]
        arrive = "-" if not lost else "NO" if any(lost) else "yes"
        errors = []
        for gemm in GEMMS:
            found = [f.measured for f in self.findings if f.what == f"{gemm} product" and f.measured is not None]
            errors.append(f"{max(found):.1e}" if found else "-")
        compared = f"{len(self.findings)}, {len(self.faults)} faults"
        agree = [not finding.fault for finding in self.findings if finding.what.endswith(AS_ON_A_CPU)]
        as_on_a_cpu = f"{sum(agree)} of {len(agree)}" if agree else "-"
        shares: dict[str, float] = {}
        for finding in self.findings:
            if " bits" in finding.what and finding.measured is not None:
                shares[finding.what] = max(finding.measured, shares.get(finding.what, 0.0))
        other_bits = ", ".join(f"{share:.1%}" for share in shares.values()) or "-"
        return [self.precision, self.backend, compared, as_on_a_cpu, arrive, *errors, other_bits]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    known = sorted(path.stem for path in (CONFIGS / "precision").glob("*.yaml"))
    parser = argparse.ArgumentParser(prog="prove_backend.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of pretrain.py, such as model=hybrid_60m")
    parser.add_argument("--precision", nargs="+", choices=known, default=PRECISIONS)
    parser.add_argument("--backend", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--page", type=Path, metavar="FILE", help="also measure times, and write everything to FILE")
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    return run_command("prove_backend.py", lambda: prove(options, arguments), options.page)


def prove(options: argparse.Namespace, arguments: list[str]) -> int:
    """Compare, measure with --page, print; returns the exit code."""
    began = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if options.page:
        check_place(options.page)
    configs = {name: composed(name, options.overrides, device.type) for name in options.precision}
    cases = {name: cases_of(config, bool(options.overrides), device.type) for name, config in configs.items()}
    proofs = []
    for name, config in configs.items():
        for backend_name in options.backend:
            say(f"{name}, {backend_name}")
            backend = backend_for(config, backend_name, device.type) if cases[name] else "it quantizes no linear"
            if isinstance(backend, str):
                proofs.append(Proof(name, backend_name, untested=backend))
            else:
                recipes = dict.fromkeys(case.recipe for case in cases[name])
                found = [finding for case in cases[name] for finding in check(backend, case, device, fairness=True)]
                found += [finding for recipe in recipes for finding in compare_with_cpu(backend, recipe, device)]
                proofs.append(Proof(name, backend_name, found))
    text = report(proofs, device)
    if options.page:
        no_gpu = "Times, steps, CUDA graphs: not run: there is no CUDA device here."
        text += f"\n\n{measured(options.backend, device) if device.type == 'cuda' else no_gpu}\n\n"
        command = shlex.join(["python", "scripts/prove_backend.py", *arguments])
        text += f"`{command}`, {datetime.date.today()}, {time.perf_counter() - began:.0f} s."
        options.page.write_text(text + "\n")
    print(text)
    return 1 if any(proof.faults for proof in proofs) else 0


def say(what: str) -> None:
    """Print what runs now to stderr."""
    print(f"{what} ...", file=sys.stderr, flush=True)


def composed(precision: str, overrides: list[str], device_type: str) -> Config:
    """The configuration of a run in this precision, with the ranks of its mesh. Raises ConfigError."""
    config = compose_config([f"precision={precision}", *overrides], CONFIGS)
    never = replace(config.precision, switch=replace(config.precision.switch, when="never"))
    config = replace(config, precision=never, after_switch=None)
    emulated = replace(config, precision=replace(config.precision, backend="emulated"))
    check_config(emulated, models, data, math.prod(config.parallel.sizes.values()), device_type)
    return config


def backend_for(config: Config, name: str, device_type: str) -> Backend | str:
    """The backend, or why it does not support this machine or recipe."""
    wanted = replace(config, precision=replace(config.precision, backend=name))  # type: ignore[arg-type]
    try:
        return choose_backend(wanted, device_type, plans_of(wanted, models)).open()
    except ConfigError as error:
        return str(error)


def cases_of(config: Config, named: bool, device_type: str) -> list[Case]:
    """What to compute. named: whether there are overrides; then it is each different quantized linear of one rank with
    its recipe in the plan, otherwise `SHAPES` with every recipe of the precision. Raises ConfigError."""
    if not named:
        recipes = dict.fromkeys(recipes_by_key(config.precision, "precision").values())
        return [Case(*shape, recipe) for recipe in recipes if recipe.quantized for shape in SHAPES[device_type]]
    tokens, ranks = config.train.micro_batch_size * config.train.sequence_length, config.parallel.tensor
    tokens = min(tokens, _CPU_TOKENS) if device_type == "cpu" else tokens
    cases: dict[Case, None] = {}
    for row in (row for row in plans_of(config, models)[0].rows if row.recipe.quantized):
        linear, (of_inputs, of_outputs) = row.linear, (ranks, 1) if row.linear.input_sharded else (1, ranks)
        shape = linear.in_features // of_inputs, linear.out_features // of_outputs, max(1, linear.groups // of_outputs)
        cases[Case(tokens, *shape, row.recipe)] = None
    return list(cases)


# ---------------------------------------------------------------------------------------------------- codes as on a CPU

AS_ON_A_CPU = "codes as on a CPU"
_SHAPE = (256, 256, 384)  # tokens, inputs, outputs; no backend needs padding for them
MakeBoth = Callable[[], dict[OperandSlot, Any]]


def compare_with_cpu(backend: Backend, recipe: Recipe, device: torch.device) -> Iterator[Finding]:
    """Compare every operand of a small linear with the one that PyTorch makes on this machine's CPU, bit for bit: first
    rounded to nearest, then those that are rounded stochastically, if the backend uses our draws."""
    case, cpu = Case(*_SHAPE, 1, recipe), torch.device("cpu")
    tensors = padded_tensors(EMULATED, case, cpu)

    def operands(by: Backend, used: Recipe, where: torch.device) -> dict[OperandSlot, Any]:
        context = LinearContext("small", used, StepState(seed=7), by)
        makes = operand_makers(context, {name: tensor.to(where) for name, tensor in tensors.items()})
        return {slot: operand for make in makes.values() for slot, operand in make().items()}

    drawn = [slot for slot in SLOTS if recipe[slot].drawn and backend.draws_ours]
    try:
        for what, used, slots in (("", rounded_to_nearest(recipe), SLOTS), (" drawn", recipe, drawn)):
            made, right = operands(backend, used, device), operands(EMULATED, used, cpu)
            for slot in slots:
                values, expected = (operand[slot].unpacked().to(cpu, torch.float32) + 0.0 for operand in (made, right))
                fault = difference("values", values, expected)
                if not fault and right[slot].scale is not None:
                    fault = difference("tensor scale", made[slot].scale.to(cpu), right[slot].scale)
                yield Finding(case, f"{slot.name}{what} {AS_ON_A_CPU}", fault)
    except Exception as error:  # the page is still written
        yield Finding(case, AS_ON_A_CPU, f"failed: {one_line(error)}")


def operand_makers(context: LinearContext, tensors: dict[str, Tensor]) -> dict[str, MakeBoth]:
    """For each tensor of a linear, a function that makes its two operands. tensors: padded, by name."""
    call = LinearCall(context, tensors["weight"], tensors["activation"])

    def both(name: str) -> dict[OperandSlot, Any]:
        return {slot: make() for slot, make, _ in makers_of(call, name, tensors[name])}

    return {name: functools.partial(both, name) for name in tensors}


# ------------------------------------------------------------------------------------------------------------- measured

# (tokens, inputs, outputs, groups) of the 8B hybrid's up_proj, for a micro-batch of one sequence.
LINEAR = (8192, 4096, 21504, 1)
# A Transformer with eight layers and the widths of the 8B hybrid, with every linear quantized.
MODEL = [
    *("model=transformer_1_2b", "model.pattern=*-*-*-*-*-*-*-*-", "model.hidden_dim=4096", "model.ffn_dim=21504"),
    *("model.num_query_heads=32", "model.vocab_size=32768", "precision.switch.when=never", "run.deterministic=false"),
    *("train.sequence_length=8192", "train.micro_batch_size=1", "train.global_batch_size=2"),
]
_ALL_QUANTIZED = ["precision.bf16_blocks.first=0", "precision.bf16_blocks.last=0"]
# Label -> precision and overrides to measure.
FORMATS = {name: [name] for name in ("bf16", "fp8_block", "mxfp8", "nvfp4")}
_NEAREST = [f"precision.{gemm}.gradient.rounding=nearest" for gemm in ("dgrad", "wgrad")]
_PLAIN = ["nvfp4", "precision.wgrad.rht=0", *_NEAREST]
_SIX = ("fprop.activation", "fprop.weight", "dgrad.gradient", "wgrad.gradient", "wgrad.activation")
QUANTIZERS = {
    "nvfp4 plain": _PLAIN,
    "four over six": [*_PLAIN, *(f"precision.{operand}.four_over_six=absolute" for operand in _SIX)],
    "Hadamard": ["nvfp4", *_NEAREST],
}

Missing = dict[tuple[str, str], str]  # (precision, backend) -> why there are no measurements


def measured(backends: list[str], device: torch.device) -> str:
    """A table for each of `MEASURED`, with the reasons for missing rows."""
    native, parts = [name for name in backends if name != "emulated"], list[str]()
    for title, function, variants in MEASURED:
        times, missing = dict[tuple[str, str], dict[str, str]](), Missing()
        for label, of in ((key, of) for key in variants for of in (["emulated"] if key == "bf16" else native)):
            say(f"{title}: {label}, {of}")
            preset, *overrides = variants[label]
            try:
                config = compose_config([f"precision={preset}", *overrides], CONFIGS)
                backend = backend_for(config, of, device.type)
                if isinstance(backend, str):
                    raise ConfigError(backend)
                times[label, of] = function(backend, recipe_from_config(config.precision), device)
            except Exception as error:
                missing[label, of] = str(error) if isinstance(error, ConfigError) else one_line(error)
        heads = ["precision", "backend", *next(iter(times.values()), [])]
        rows = [[*of, *values.values()] for of, values in times.items()]
        parts += [f"{title}:", with_reasons(heads, rows, missing)]
    return "\n\n".join(parts)


def one_line(error: BaseException) -> str:
    """An error in one line that fits into a table."""
    return first_line(error).replace("|", "/")


def times_of(backend: Backend, recipe: Recipe, device: torch.device) -> dict[str, str]:
    """Milliseconds of each GEMM of `LINEAR`, of all three, and of making both operands of each tensor."""
    case = Case(*LINEAR, recipe)
    makers = operand_makers(case.context(backend), padded_tensors(backend, case, device))
    made = {slot: operand for make in makers.values() for slot, operand in make().items()}
    functions: dict[str, Callable[[], Any]] = {}
    for gemm in GEMMS:
        left, right = (made[slot] for slot in SLOTS if slot.gemm == gemm)
        dtype = torch.float32 if gemm == "wgrad" else torch.bfloat16
        functions[gemm] = functools.partial(backend.gemm, left, right, dtype)
        functions[gemm]()  # the first call compiles
    times = {name: median_milliseconds(function, device, 20) for name, function in (functions | makers).items()}
    times["GEMMs"] = sum(times[gemm] for gemm in GEMMS)
    return {name: f"{time:.3f}" for name, time in times.items()}


def step_of(backend: Backend, recipe: Recipe, device: torch.device) -> dict[str, str]:
    """Time and memory of a step of `MODEL`, measured in a separate process."""
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        output, script = Path(folder) / "step.json", Path(__file__).with_name("benchmark.py")
        command = [sys.executable, str(script), "parallel", "--warmup=3", "--steps=5", f"--output={output}", *MODEL]
        command += [f"precision={recipe.name}", f"precision.backend={backend.name}"]
        command += _ALL_QUANTIZED if recipe.quantized else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise ConfigError(next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}"))
        found = json.loads(output.read_text())
    return {
        "ms": f"{found['median_seconds'] * 1e3:.1f}",
        "tokens/s": f"{found['tokens_per_second']:,.0f}",
        "peak, GiB": f"{found['peak_gib']:.1f}",
        "first step, s": f"{found['first_step_seconds']:.1f}",
    }


def capture(backend: Backend, recipe: Recipe, device: torch.device) -> dict[str, str]:
    """Whether a CUDA graph captures a linear, forward and backward, and whether its replay equals an eager call."""
    case = Case(1024, 512, 1024, 1, recipe)
    x, w, dy = sample_tensors(case, device)
    context = case.context(backend)
    keys = context.step_state.keys = DeviceKeys({context.name: recipe}, device)
    fill = functools.partial(keys.fill, context.step_state.seed, context.step_state.step, 0)
    for t in (x, w):
        t.requires_grad_()

    def compute() -> Tensor:
        x.grad = w.grad = context.weight_cache = None
        y = quantized_linear(x, w, context)
        y.backward(dy)
        assert x.grad is not None and w.grad is not None
        return torch.cat([t.detach().to(torch.float32).flatten() for t in (y, x.grad, w.grad)])

    for _ in range(2):
        fill()
        eager = compute()
    gc.collect()
    fill()
    try:
        graph = GpuGraph(compute, torch.cuda.graph_pool_handle(), keys.generators)
        graph.replay()
        equal = torch.equal(graph.result, eager)
    except Exception as error:
        first = error.__context__ or error  # ending a broken capture raises a second error
        return {"captured": f"no: {one_line(first)}"}
    return {"captured": "yes, equal bits" if equal else "yes, other bits"}


# (title, function, what to measure). The last one may leave the device unusable.
Measure = Callable[[Backend, Recipe, torch.device], dict[str, str]]
MEASURED: list[tuple[str, Measure, dict[str, list[str]]]] = [
    ("A linear's GEMMs, and both operands of each tensor, ms", times_of, FORMATS | QUANTIZERS),
    ("A step of eight layers, two micro-batches", step_of, FORMATS),
    ("A linear in a CUDA graph", capture, FORMATS),
]


# --------------------------------------------------------------------------------------------------------------- report


def report(proofs: list[Proof], device: torch.device) -> str:
    """The results as a block of Markdown."""
    faults = [f"- {proof.backend}: {finding}" for proof in proofs for finding in proof.faults]
    parts = [
        f"### Proof of the backends on {machine()}",
        f"**{len(faults)} faults.**" if faults else "All that was tested agrees.",
        "\n".join(faults),
        markdown(["what", "is"], list(surroundings(device).items()), left=2),
        "Comparisons with the reference; largest relative error of each product against FP64 (fprop and dgrad are "
        "rounded to BF16, which alone is 1.7e-03); and of fprop, dgrad, wgrad, and wgrad added to a gradient, the FP32 "
        "outputs with other bits than in Blackwell's published order of sums:",
        with_reasons(
            ["precision", "backend", "comparisons", AS_ON_A_CPU, "NaN, inf arrive", *GEMMS, "other bits"],
            [proof.row() for proof in proofs if not proof.untested],
            {(proof.precision, proof.backend): proof.untested for proof in proofs if proof.untested},
        ),
        "The order in which GEMMs add, read from their sums (precision/probes.py):",
        orders_of_sums({proof.backend for proof in proofs if not proof.untested}, device),
    ]
    return "\n\n".join(part for part in parts if part)


def orders_of_sums(backends: set[str], device: torch.device) -> str:
    """A table of the orders of sums of this device's GEMMs. backends: those that run here."""
    gemms = [probes.of_backend(EmulatedBackend("blackwell"), "NVFP4, emulated with sums=blackwell")]
    gemms += [probes.of_backend(BACKENDS[name](), f"NVFP4, {name}") for name in sorted(backends - {"emulated"})]
    gemms += list(probes.of_libraries(device)) if device.type == "cuda" else []
    rows = []
    for gemm in gemms:
        try:
            found = probes.describe(gemm, device)
        except Exception as error:  # the page is still written
            found = {"group": f"failed: {one_line(error)}"}
        cells = [found.get(column, "-") for column in probes.BLACKWELL]
        rows.append([gemm.name, *cells, "yes" if found == probes.BLACKWELL else "no"])
    return markdown(["GEMM", *probes.BLACKWELL, "as published of Blackwell"], rows, left=7)


def with_reasons(heads: list[str], rows: list[list[str]], missing: Missing) -> str:
    """A table, if it has rows, and a line for each reason for missing rows."""
    why: dict[str, list[str]] = {}
    for (precision, backend), reason in missing.items():
        why.setdefault(f"{backend}: {reason}", []).append(precision)
    lines = [f"- not run: {', '.join(labels)} by {reason}" for reason, labels in why.items()]
    return markdown(heads, rows, lines, left=2) if rows else "\n".join(lines)


# Prefixes of environment variables that change codes, results of GEMMs or kernels.
_VARIABLES = ("NVTE_", "CUBLAS_", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "TRITON_", "CUDA_MODULE_LOADING")


def machine() -> str:
    """The device in one line."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), no CUDA device"


def surroundings(device: torch.device) -> dict[str, str]:
    """Versions, torch's switches, and the environment variables that may change bits. Of a variable with a path only
    "set" is shown, because reports are passed on."""
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    matmul, on_gpu = torch.backends.cuda.matmul, device.type == "cuda"
    driver = {"driver": str(collect_env.get_nvidia_driver_version(collect_env.run))} if on_gpu else {}
    return made_by(device) | {
        **driver,
        **{name: "set" if "/" in value else value for name, value in variables.items()},
        "torch allow_tf32": str(matmul.allow_tf32),
        "torch allow_bf16_reduced_precision_reduction": str(matmul.allow_bf16_reduced_precision_reduction),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
