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
import math
import sys
from dataclasses import dataclass, field, replace

import torch

from data import provider as data
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.backend_support import BACKENDS, choose_backend, recipes_by_key
from megatron_fp4.precision.linear import LinearCall
from megatron_fp4.precision.recipe import GEMMS, Recipe, recipe_from_config
from megatron_fp4.precision.transformer_engine import not_installed
from megatron_fp4.precision.verify import Case, Finding, check, fairness_of, sample_tensors
from megatron_fp4.runtime.closed_pipe import end_without_reader
from megatron_fp4.training.build import plans_of
from megatron_fp4.training.check import check as check_config
from models import provider as models
from pretrain import CONFIGS
from scripts.prove.machine import linear_times, machine, switches, versions
from scripts.prove.specification import properties

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
        from scripts.prove.transformer_engine import compare

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


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
