"""Prove on this machine, in two minutes and without a run, that the backends compute what the recipes say.

    python scripts/prove_backend.py                                      every precision and backend, some shapes
    python scripts/prove_backend.py model=nemotron_h_8b parallel.tensor=8     the quantized linears of one rank of it
    python scripts/prove_backend.py precision.wgrad.rht=0 --precision nvfp4 --backend transformer_engine

    python scripts/prove_backend.py model=hybrid_60m --transformer-engine     a model's linears beside `te.Linear`, too

Arguments are overrides of pretrain.py, before the options. Each linear is computed by its own recipe in the plan; where
no run is named, every shape by every recipe of the precision. Compared are: the reference quantizers with the formats'
definition, by brute force; every operand's codes, scales and maxima with the reference; the fairness of stochastic
rounding; the three products with FP64; what becomes of NaN and inf (precision/verify.py); and timed is every linear
against BF16. What this machine cannot run is listed with the reason. The end is a block of Markdown for a report. Exit
codes: 0 all agrees, 1 something does not, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils import collect_env

from data import provider as data
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.emulated import EMULATED
from megatron_fp4.precision.linear import LinearCall, LinearContext, quantized_linear
from megatron_fp4.precision.recipe import BF16, GEMMS, Recipe, recipe_from_config
from megatron_fp4.precision.rng import StepState
from megatron_fp4.precision.support import BACKENDS, choose_backend, recipes_by_key
from megatron_fp4.precision.transformer_engine import not_installed
from megatron_fp4.precision.verify import Case, Finding, check, fairness_of, sample_tensors
from megatron_fp4.quantization.elements import E2M1_VALUES, E4M3_MAX, e2m1_values, ue8m0_values, unpack_codes
from megatron_fp4.quantization.fp8 import quantize_fp8
from megatron_fp4.quantization.hadamard import random_hadamard_transform
from megatron_fp4.quantization.mxfp4 import quantize_mxfp4
from megatron_fp4.quantization.mxfp8 import quantize_mxfp8
from megatron_fp4.quantization.nvfp4 import quantize_nvfp4
from megatron_fp4.runtime.closed_pipe import end_without_reader
from megatron_fp4.training.build import plans_of
from megatron_fp4.training.check import check as check_config
from models import provider as models
from pretrain import CONFIGS

# Tokens, inputs, outputs and groups of these where no model is named: whole blocks of every format, and outputs that
# must be padded.
Shape = tuple[int, int, int, int]
SHAPES: dict[str, list[Shape]] = {
    "cpu": [(128, 256, 256, 1), (256, 128, 400, 2)],
    "cuda": [(1024, 512, 2048, 1), (512, 2048, 1200, 2), (8192, 4096, 8192, 1)],
}
_CPU_TOKENS = 256


@dataclass
class Proof:
    """One precision on one backend. untested: why not, or empty. fair: operand -> bias and spread."""

    precision: str
    backend: str
    untested: str = ""
    findings: list[Finding] = field(default_factory=list)
    fair: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def faults(self) -> list[Finding]:
        """The findings that are faults."""
        return [finding for finding in self.findings if finding.fault]

    def worst(self, gemm: str) -> str:
        """The largest relative error of a GEMM's products."""
        errors = [f.measured for f in self.findings if f.what == f"{gemm} product" and f.measured is not None]
        return f"{max(errors):.1e}" if errors else "-"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, its first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    known = sorted(path.stem for path in (CONFIGS / "precision").glob("*.yaml"))
    default = [name for name in ("nvfp4", "mxfp4", "mxfp8", "fp8_block") if name in known]
    parser = argparse.ArgumentParser(prog="prove_backend.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of pretrain.py, such as model=hybrid_60m")
    parser.add_argument("--precision", nargs="+", choices=known, default=default)
    parser.add_argument("--backend", nargs="+", choices=["all", *BACKENDS], default=["all"])
    parser.add_argument(
        "--transformer-engine",
        action="store_true",
        help="train the model for three steps and compare its linears with Transformer Engine's own, bit for bit",
    )
    options, rest = parser.parse_known_intermixed_args(arguments)
    if unknown := [argument for argument in rest if argument.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides += rest
    return options


def main(arguments: list[str]) -> int:
    """Prove, print the Markdown block, and return the exit code."""
    options = parse(arguments)
    if options.transformer_engine and (reason := not_installed()):
        print(f"prove_backend.py: --transformer-engine: {reason}", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    names = list(BACKENDS) if "all" in options.backend else list(dict.fromkeys(options.backend))
    try:
        configs = {name: composed(name, options.overrides, device.type) for name in options.precision}
        cases = {name: cases_of(config, bool(options.overrides), device.type) for name, config in configs.items()}
    except ConfigError as error:
        print(f"prove_backend.py: {error}", file=sys.stderr)
        return 2
    definition = list(properties(device))
    proofs: list[Proof] = []
    able: dict[Shape, dict[str, tuple[Recipe, Backend]]] = {}
    for name, config in configs.items():
        for backend_name in names:
            print(f"{name}, {backend_name} ...", file=sys.stderr, flush=True)
            backend = backend_for(config, backend_name, device.type) if cases[name] else "it quantizes no linear"
            if isinstance(backend, str):
                proofs.append(Proof(name, backend_name, untested=backend))
                continue
            proof = prove(Proof(name, backend_name), backend, cases[name], device)
            proofs.append(proof)
            if not any(finding.what == "kernels" for finding in proof.findings):
                own = recipe_from_config(config.precision)
                for case in cases[name]:
                    shape = (case.tokens, case.inputs, case.outputs, case.num_groups)
                    label = name if case.recipe == own else f"{name}: {case.recipe.name}"
                    able.setdefault(shape, {})[f"{label}, {backend_name}"] = case.recipe, backend
    print("times ...", file=sys.stderr, flush=True)
    times = [(shape, linear_times(shape, candidates, device)) for shape, candidates in able.items()]
    print(report(definition, proofs, times, device))
    agreed = all(holds for _, holds in definition) and not any(proof.faults for proof in proofs)
    if options.transformer_engine:
        from scripts.prove_transformer_engine import compare

        agreed = compare(options.overrides, steps=3) and agreed
    return 0 if agreed else 1


def composed(precision: str, overrides: list[str], device_type: str) -> Config:
    """The configuration of a run in this precision, on as many ranks as share its model. Raises ConfigError."""
    config = compose_config([f"precision={precision}", *overrides], CONFIGS)
    never = replace(config.precision, switch=replace(config.precision.switch, when="never"))
    config = replace(config, precision=never, after_switch=None)
    emulated = replace(config, precision=replace(config.precision, backend="emulated"))
    check_config(emulated, models, data, math.prod(config.parallel.sizes.values()), device_type)
    return config


def backend_for(config: Config, name: str, device_type: str) -> Backend | str:
    """The backend, or why this machine or recipe does not go with it."""
    wanted = replace(config, precision=replace(config.precision, backend=name))  # type: ignore[arg-type]
    try:
        return choose_backend(wanted, device_type, plans_of(wanted, models)).open()
    except ConfigError as error:
        return str(error)


def cases_of(config: Config, named: bool, device_type: str) -> list[Case]:
    """What to compute: the different quantized linears of one rank by the run's plan, or if no run is `named` some
    shapes by every recipe of the precision. Raises ConfigError for a plan that the model does not go with."""
    if not named:
        recipes = dict.fromkeys(recipes_by_key(config.precision, "precision").values())
        return [Case(*shape, recipe) for recipe in recipes if recipe.quantized for shape in SHAPES[device_type]]
    model, shards = config.model, config.parallel.tensor
    tokens = config.train.micro_batch_size * config.train.sequence_length
    tokens = min(tokens, _CPU_TOKENS) if device_type == "cpu" else tokens
    groups = {"in_proj": model.mamba_num_groups // shards, "qkv_proj": model.num_kv_heads // shards}
    plan, _ = plans_of(config, models)
    cases: dict[Case, None] = {}
    for row in plan.rows:
        kind = row.linear.name.split(".")[-1]
        along_inputs = kind in ("out_proj", "down_proj")
        inputs = row.linear.in_features // (shards if along_inputs else 1)
        outputs = row.linear.out_features // (1 if along_inputs else shards)
        if row.recipe.quantized:
            cases[Case(tokens, inputs, outputs, groups.get(kind, 1), row.recipe)] = None
    return list(cases)


def prove(proof: Proof, backend: Backend, cases: list[Case], device: torch.device) -> Proof:
    """`proof` with all comparisons; a kernel that fails is a fault too."""
    for case in cases:
        proof.findings += (found := check(backend, case, device))
        if any(finding.what == "kernels" for finding in found):
            continue
        x, w, dy = sample_tensors(case, device)
        call = LinearCall(case.context(backend), w, x)
        tensors = {"activation": call.pad_tokens(x), "weight": call.pad_rows(w), "gradient": call.pad(dy)}
        for name, one in fairness_of(backend, case, tensors):
            bias, spread = proof.fair.get(name, (0.0, 1.0))
            proof.fair[name] = max(one.bias, bias, key=abs), max(one.spread, spread, key=lambda s: abs(s - 1))
    return proof


def report(
    definition: list[tuple[str, bool]],
    proofs: list[Proof],
    times: list[tuple[Shape, dict[str, float]]],
    device: torch.device,
) -> str:
    """The Markdown block."""
    compared = [
        [p.precision, p.backend, f"not tested: {p.untested}", "-", "-", "-", "-"]
        if p.untested
        else [p.precision, p.backend, f"{len(p.findings)}, {len(p.faults)} faults", nan_of(p), *map(p.worst, GEMMS)]
        for p in proofs
    ]
    fair = [
        [f"{p.precision}, {p.backend}", name, f"{bias:+.5f}", f"{spread:.4f}"]
        for p in proofs
        for name, (bias, spread) in p.fair.items()
    ]
    timed = [
        [f"{tokens} tokens, {inputs} -> {outputs}", name, f"{ms:.3f}", f"{ms / found['bf16']:.2f}"]
        for (tokens, inputs, outputs, _), found in times
        for name, ms in found.items()
    ]
    how = (
        "medians of spans of calls"
        if device.type == "cuda"
        else "**on a CPU**, medians of three calls: a rough measure"
    )
    faults = [f"- {p.backend}: {finding}" for p in proofs for finding in p.faults]
    faults += [f"- {what}: it does not hold" for what, holds in definition if not holds]
    parts = [
        f"### Proof of the backends on {machine()}",
        f"**{len(faults)} faults.**" if faults else "All that was tested agrees.",
        "\n".join(faults),
        table(["what", "version"], [list(row) for row in versions().items()]),
        table(["switch", "is"], [list(row) for row in switches().items()]),
        table(["the reference quantizers", "holds"], [[what, "yes" if holds else "NO"] for what, holds in definition]),
        "Comparisons with the reference; largest relative error of each product against FP64 (fprop and dgrad are "
        "rounded to BF16, which alone is 1.7e-03):",
        table(["precision", "backend", "comparisons", "NaN, inf arrive", *GEMMS], compared),
        "Stochastic rounding to NVFP4, 16 draws: goes up more often than it should, in spacings (fair: 0); its "
        "variance over that of a fair draw (1):",
        table(["precision, backend", "operand", "bias", "spread"], fair),
        f"Forward and backward of one linear, the weight quantized in each call ({how}):",
        table(["linear", "precision, backend", "ms", "of BF16"], timed),
    ]
    return "\n\n".join(part for part in parts if part)


def nan_of(proof: Proof) -> str:
    """Whether NaN and inf reach every product."""
    found = [finding for finding in proof.findings if finding.what == "NaN and inf"]
    return "-" if not found else "NO" if any(finding.fault for finding in found) else "yes"


# --------------------------------------------------------------------------------------------- the reference quantizers

# Quotients and products are FP32: near a tie the other neighbour is as good to that precision.
_SLACK = 1e-6


def properties(device: torch.device) -> Iterator[tuple[str, bool]]:
    """(what must hold of the reference quantizers, whether it does) on random tensors with outliers.

    By brute force over all codes, in FP64, without their rounding: everything else is compared with them.
    """
    generator = torch.Generator(device).manual_seed(5)
    x = torch.randn(256, 256, generator=generator, device=device)
    x[:, ::41] *= 30
    x[::9] *= 1e-3
    e2m1 = torch.tensor([*(-value for value in E2M1_VALUES[1:]), *E2M1_VALUES], dtype=torch.float64, device=device)
    every = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.float64)
    e4m3 = every[every.isfinite()]

    nvfp4 = quantize_nvfp4(x)
    decode = nvfp4.amax.double() / 2688
    scales = nvfp4.scales.double()
    blocks = x.double().unflatten(-1, (-1, 16))
    block_amax = blocks.abs().amax(-1)
    yield "NVFP4: block scales are the nearest E4M3 numbers", _nearest(scales, block_amax / 6 / decode, e4m3)
    codes = e2m1_values(unpack_codes(nvfp4.codes)).double()
    yield (
        "NVFP4: codes are the nearest of all 15",
        _nearest(codes, (blocks / scales[..., None] / decode).flatten(-2), e2m1),
    )
    square, turned = quantize_nvfp4(x, (16, 16)), quantize_nvfp4(x.t(), (16, 16))
    same = torch.equal(unpack_codes(square.codes).t(), unpack_codes(turned.codes))
    yield "NVFP4: 16x16 codes of the transpose are the transposed codes", same

    mxfp4 = quantize_mxfp4(x)
    powers, blocks = ue8m0_values(mxfp4.scales).double(), x.double().unflatten(-1, (-1, 32))
    least = _least_powers(powers, blocks.abs().amax(-1) / 6)
    yield "MXFP4: scales are the least powers of two that clip nothing", least
    codes = e2m1_values(unpack_codes(mxfp4.codes)).double()
    yield "MXFP4: codes are the nearest of all 15", _nearest(codes, (blocks / powers[..., None]).flatten(-2), e2m1)

    mxfp8 = quantize_mxfp8(x)
    powers = ue8m0_values(mxfp8.scales).double()
    least = _least_powers(powers, blocks.abs().amax(-1) / E4M3_MAX)
    yield "MXFP8: scales are the least powers of two that clip nothing", least
    quotients = (blocks / powers[..., None]).flatten(-2)
    yield "MXFP8: codes are the nearest E4M3 numbers", _nearest(mxfp8.codes.double(), quotients, e4m3)

    fp8 = quantize_fp8(x)
    quotients = (x.double().unflatten(-1, (-1, 128)) / fp8.scales.double()[..., None]).flatten(-2)
    yield "FP8: codes are the nearest E4M3 numbers", _nearest(fp8.codes.double(), quotients, e4m3)

    rows, columns = x.to(torch.bfloat16), x.flip(0).to(torch.bfloat16)
    exact = rows.double() @ columns.double().t()
    after = (random_hadamard_transform(t.double(), 16) for t in (rows, columns))
    left, right = after
    yield "RHT: both sides transformed, the product is the same", torch.allclose(left @ right.t(), exact, rtol=1e-10)


def _least_powers(powers: Tensor, needed: Tensor) -> bool:
    """Whether every power of two is at least what is needed, and half of it is less."""
    return bool(((powers >= needed * (1 - _SLACK)) & (powers / 2 < needed * (1 + _SLACK))).all())


def _nearest(chosen: Tensor, exact: Tensor, grid: Tensor) -> bool:
    """Whether no number of `grid` is nearer to `exact` than `chosen` is."""
    error = (chosen - exact).abs()
    least = torch.full_like(error, torch.inf)
    for value in grid.unique():
        least = torch.minimum(least, (value - exact).abs())
    return bool((error <= least + _SLACK * exact.abs().clamp(min=_SLACK)).all())


# --------------------------------------------------------------------------------------------------------- this machine

# Environment variables that change codes, products or kernels begin so.
_VARIABLES = ("NVTE_", "CUBLAS_", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "TRITON_", "CUDA_MODULE_LOADING")


def machine() -> str:
    """The device in one line."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = f"compute capability {properties.major}.{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        return f"{properties.name}, {capability}, {properties.multi_processor_count} SMs, {memory}"
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), no CUDA device"


def versions() -> dict[str, str]:
    """Name -> version."""
    found = {"Python": platform.python_version(), "torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
    if torch.cuda.is_available():
        found["driver"] = str(collect_env.get_nvidia_driver_version(collect_env.run))
    for name in ("triton", "transformer_engine", "nvidia-cublas"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def switches() -> dict[str, str]:
    """Name -> value of every environment variable that may change bits and is set, and of torch's own switches.

    Of a variable that holds a path only that it is set: reports are passed on.
    """
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    matmul, smallest = torch.backends.cuda.matmul, torch.tensor([2.0**-126])
    return {name: "set" if "/" in value else value for name, value in found.items()} | {
        "torch allow_tf32": str(matmul.allow_tf32),
        "torch allow_bf16_reduced_precision_reduction": str(matmul.allow_bf16_reduced_precision_reduction),
        "torch deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "denormals on the CPU": "flushed to zero" if (smallest * 0.5 == 0).all() else "kept",
    }


_SPAN = 0.03  # seconds of calls that are timed together
_ROUNDS = 7


def linear_times(
    shape: tuple[int, int, int, int], candidates: Mapping[str, tuple[Recipe, Backend]], device: torch.device
) -> dict[str, float]:
    """Milliseconds by name, `bf16` first: the median of spans of calls, taken in turns; weights quantized every call.

    shape: tokens, input and output features, and groups of these. On a CPU one call a span and three rounds: a rough
    measure.
    """
    steps = {"bf16": _step(Case(*shape, BF16), EMULATED, device)}
    steps |= {name: _step(Case(*shape, recipe), backend, device) for name, (recipe, backend) in candidates.items()}
    cuda = device.type == "cuda"
    repeats = {}
    for name, step in steps.items():
        _seconds(step, 3 if cuda else 1, cuda)  # warms up
        repeats[name] = max(2, int(_SPAN / _seconds(step, 3, cuda))) if cuda else 1
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS if cuda else 3):
        for name, step in steps.items():
            found[name].append(_seconds(step, repeats[name], cuda))
    return {name: statistics.median(times) * 1e3 for name, times in found.items()}


def _step(case: Case, backend: Backend, device: torch.device) -> Callable[[], None]:
    x, w, dy = sample_tensors(case, device)
    state = StepState(seed=7)
    context = LinearContext("prove", case.recipe, state, backend, num_groups=case.num_groups)
    x, w = x.requires_grad_(), w.requires_grad_()

    def step() -> None:
        x.grad = w.grad = None
        state.weights_version += 1
        quantized_linear(x, w, context).backward(dy)

    return step


def _seconds(step: Callable[[], None], repeats: int, cuda: bool) -> float:
    """Mean time of `repeats` calls in a row."""
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
