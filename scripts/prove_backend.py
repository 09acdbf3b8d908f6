"""Check on this machine, in a minute and without a run, that the backends compute what the recipes define.

    python scripts/prove_backend.py                                      every precision and backend, some shapes
    python scripts/prove_backend.py --page page.md                       also measures times, in ten minutes
    python scripts/prove_backend.py model=nemotron_h_8b parallel.tensor=8     the quantized linears of one of its ranks
    python scripts/prove_backend.py precision.wgrad.rht=0 --precision nvfp4 --backend transformer_engine

Arguments before the options are overrides of pretrain.py. With overrides each linear of the model is computed with its
recipe in the plan; without, some shapes with every recipe of the precision. It compares codes, scales and amax of every
operand with the reference, and those of the default precisions also with fingerprints from a CPU (`FINGERPRINTS`). The
results of the three GEMMs are compared with FP64, NaN and inf must arrive in them, and stochastic rounding must pass a
statistical test (precision/verify.py). The output is a block of Markdown.

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
import hashlib
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
from megatron_fp4.precision.backend import Backend, first_line
from megatron_fp4.precision.linear import quantized_linear
from megatron_fp4.precision.operands import LinearCall, LinearContext
from megatron_fp4.precision.recipe import (
    GEMMS,
    SLOTS,
    OperandSlot,
    Recipe,
    recipe_from_config,
    rounded_to_nearest,
)
from megatron_fp4.precision.rng import DeviceKeys, StepState
from megatron_fp4.precision.support import BACKENDS, choose_backend, recipes_by_key
from megatron_fp4.precision.verify import Case, Finding, check, fairness_of, makers_of, padded_tensors, sample_tensors
from megatron_fp4.quantization.rounding import random_bits, rounding_key
from megatron_fp4.runtime.revision import made_by
from megatron_fp4.training.build import check as check_config
from megatron_fp4.training.build import plans_of
from megatron_fp4.training.cuda_graphs import GpuGraph
from models import provider as models
from pretrain import CONFIGS
from scripts.benchmark import median_milliseconds

# (tokens, inputs, outputs, groups of outputs) without overrides: full blocks of every format, and outputs that must be
# padded.
SHAPES: dict[str, list[tuple[int, int, int, int]]] = {
    "cpu": [(128, 256, 256, 1), (256, 128, 400, 2)],
    "cuda": [(1024, 512, 2048, 1), (512, 2048, 1200, 2), (8192, 4096, 8192, 1)],
}
_CPU_TOKENS = 256

# Fingerprints of the operands of `fingerprint_tensors` on a CPU: eight digits for each operand of `SLOTS`, rounded to
# nearest, then for each operand with stochastic rounding, with our draws. tests/test_prove_backend.py checks them.
FINGERPRINTS = {
    "nvfp4": "f5dc1818 18cc0fc8 cfd58de8 20da6bd8 813f53b4 25abc71e c193ce0c 8fe8681f",
    "nvfp4_4over6_1x16": "eef5d411 092f192b cfd58de8 d2bda2d8 813f53b4 25abc71e c193ce0c 8fe8681f",
    "mxfp4": "efcdf776 ab4cb6a3 dca8d0fe bb585d79 87d2c168 9d280633 9e95933d 8e29c605",
    "mxfp8": "180a4aa2 307eb1f2 b0085675 34b0a703 1f2d668e 82531891",
    "fp8_block": "2eeac70b 4776ccea 34de97a1 e8e57463 5b5e8633 eedbe146",
}


@dataclass
class Proof:
    """The results of one precision on one backend. untested: why it could not be tested, or empty."""

    precision: str
    backend: str
    findings: list[Finding] = field(default_factory=list)
    untested: str = ""

    @property
    def faults(self) -> list[Finding]:
        """The findings that are faults."""
        return [finding for finding in self.findings if finding.fault]

    def row(self) -> list[str]:
        """Its row in the table of comparisons."""
        lost = [bool(finding.fault) for finding in self.findings if finding.what == "NaN and inf"]
        arrive = "-" if not lost else "NO" if any(lost) else "yes"
        errors = []
        for gemm in GEMMS:
            found = [f.measured for f in self.findings if f.what == f"{gemm} product" and f.measured is not None]
            errors.append(f"{max(found):.1e}" if found else "-")
        compared = f"{len(self.findings)}, {len(self.faults)} faults"
        agree = [not finding.fault for finding in self.findings if finding.what.endswith(FINGERPRINT)]
        as_on_a_cpu = f"{sum(agree)} of {len(agree)}" if agree else "-"
        return [self.precision, self.backend, compared, as_on_a_cpu, arrive, *errors]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    known = sorted(path.stem for path in (CONFIGS / "precision").glob("*.yaml"))
    parser = argparse.ArgumentParser(prog="prove_backend.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of pretrain.py, such as model=hybrid_60m")
    parser.add_argument("--precision", nargs="+", choices=known, default=list(FINGERPRINTS))
    parser.add_argument("--backend", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--page", type=Path, metavar="FILE", help="also measure times, and write everything to FILE")
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options, began = parse(arguments), time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        configs = {name: composed(name, options.overrides, device.type) for name in options.precision}
        cases = {name: cases_of(config, bool(options.overrides), device.type) for name, config in configs.items()}
    except ConfigError as error:
        print(f"prove_backend.py: {error}", file=sys.stderr)
        return 2
    proofs = []
    for name, config in configs.items():
        for backend_name in options.backend:
            say(f"{name}, {backend_name}")
            backend = backend_for(config, backend_name, device.type) if cases[name] else "it quantizes no linear"
            if isinstance(backend, str):
                proofs.append(Proof(name, backend_name, untested=backend))
            else:
                found = [finding for case in cases[name] for finding in findings(backend, case, device)]
                if name in FINGERPRINTS and not options.overrides:
                    found += check_fingerprints(backend, name, device)
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
    its recipe in the plan, otherwise `SHAPES` with every recipe of the precision. Raises ConfigError for a plan that
    does not fit the model."""
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


def findings(backend: Backend, case: Case, device: torch.device) -> list[Finding]:
    """All comparisons of a case; a kernel that fails is a fault too."""
    found = check(backend, case, device)
    if backend.draws_ours and not any(finding.what == "kernels" for finding in found):
        fair = fairness_of(backend, case, padded_tensors(backend, case, device))
        found += [Finding(case, label, fault) for label, fault in fair]
    return found


# -------------------------------------------------------------------------------------------------------- fingerprints

FINGERPRINT = "codes as on a CPU"
_FINGERPRINT_SHAPE = (256, 256, 384)  # tokens, inputs, outputs; no backend needs padding for them
MakeBoth = Callable[[], dict[OperandSlot, Any]]


def check_fingerprints(backend: Backend, precision: str, device: torch.device) -> Iterator[Finding]:
    """Compares every quantized operand of a precision with its fingerprint in `FINGERPRINTS`: rounded to nearest, and
    then the stochastically rounded ones, if the backend uses our draws."""
    recipe = recipe_from_config(compose_config([f"precision={precision}"], CONFIGS).precision)
    case = Case(*_FINGERPRINT_SHAPE, 1, recipe)
    try:
        found = list(fingerprints(backend, recipe, device))
    except Exception as error:  # the page is still written
        yield Finding(case, FINGERPRINT, f"failed: {one_line(error)}")
        return
    for (label, mine), right in zip(found, FINGERPRINTS[precision].split(), strict=False):
        yield Finding(case, f"{label} {FINGERPRINT}", "" if mine == right else f"{mine} instead of {right}")


def fingerprints(backend: Backend, recipe: Recipe, device: torch.device) -> Iterator[tuple[str, str]]:
    """(name, fingerprint) of operands: eight digits of a hash of `code * block scale` and the tensor scale, in which -0
    counts as +0."""
    tensors = fingerprint_tensors(device)
    drawn = [slot for slot in SLOTS if recipe[slot].drawn and backend.draws_ours]
    for what, used, slots in (("", rounded_to_nearest(recipe), SLOTS), (" drawn", recipe, drawn)):
        makes = operand_makers(LinearContext("fingerprint", used, StepState(seed=7), backend), tensors)
        made = {slot: operand for make in makes.values() for slot, operand in make().items()}
        for slot in slots:
            parts = [part for part in (made[slot].unpacked(), made[slot].scale) if part is not None]
            in_bytes = b"".join((part.to(torch.float32) + 0.0).cpu().contiguous().numpy().tobytes() for part in parts)
            yield slot.name + what, hashlib.sha256(in_bytes).hexdigest()[:8]


def fingerprint_tensors(device: torch.device) -> dict[str, Tensor]:
    """x, W and dy in BF16, by their names in `SLOTS_OF`, the same on every machine. Values have nine bits, and some
    columns are larger and some rows smaller; a Hadamard transform is exact in any order of summation."""
    tokens, inputs, outputs = _FINGERPRINT_SHAPE
    shapes = {"activation": (tokens, inputs), "weight": (outputs, inputs), "gradient": (tokens, outputs)}
    tensors = {}
    for name, shape in shapes.items():
        values = (random_bits(rounding_key(name), *shape, device) & 0xFF).to(torch.float32) - 127.5
        values[:, ::67] *= 16
        values[1::31] *= 2.0**-4
        values[:16, :16] = 0
        tensors[name] = values.to(torch.bfloat16)
    return tensors


def operand_makers(context: LinearContext, tensors: dict[str, Tensor]) -> dict[str, MakeBoth]:
    """For each tensor of a linear, a function that makes its two operands. tensors: padded, by their names in
    `SLOTS_OF`."""
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
    if device.type == "cuda":
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
        "rounded to BF16, which alone is 1.7e-03):",
        with_reasons(
            ["precision", "backend", "comparisons", FINGERPRINT, "NaN, inf arrive", *GEMMS],
            [proof.row() for proof in proofs if not proof.untested],
            {(proof.precision, proof.backend): proof.untested for proof in proofs if proof.untested},
        ),
    ]
    return "\n\n".join(part for part in parts if part)


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
