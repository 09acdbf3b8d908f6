"""Prove on this machine, in a minute and without a run, that the backends compute what the recipes say.

    python scripts/prove_backend.py                                      every precision and backend, some shapes
    python scripts/prove_backend.py model=nemotron_h_8b parallel.tensor=8     the quantized linears of one rank of it
    python scripts/prove_backend.py precision.wgrad.rht=0 --precision nvfp4 --backend transformer_engine

Arguments are overrides of pretrain.py, before the options. Each linear is computed by its own recipe in the plan; where
no run is named, every shape by every recipe of the precision. Compared are: every operand's codes, scales and maxima
with the reference; the three products with FP64; what becomes of NaN and inf; and stochastic rounding is judged by its
statistics (precision/verify.py). What this machine cannot run is listed with the reason. The output is a block of
Markdown for a report. Exit codes: 0 all agrees, 1 something does not, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import sys
from dataclasses import dataclass, field, replace

import torch
from torch.utils import collect_env

from data import provider as data
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.precision.backend import Backend
from megatron_fp4.precision.recipe import GEMMS
from megatron_fp4.precision.support import BACKENDS, choose_backend, recipes_by_key
from megatron_fp4.precision.verify import Case, Finding, check, fairness_of, padded_tensors
from megatron_fp4.runtime.closed_pipe import end_without_reader
from megatron_fp4.training.build import check as check_config
from megatron_fp4.training.build import plans_of
from models import provider as models
from pretrain import CONFIGS

# Tokens, inputs, outputs and groups of these where no model is named: whole blocks of every format, and outputs that
# must be padded.
SHAPES: dict[str, list[tuple[int, int, int, int]]] = {
    "cpu": [(128, 256, 256, 1), (256, 128, 400, 2)],
    "cuda": [(1024, 512, 2048, 1), (512, 2048, 1200, 2), (8192, 4096, 8192, 1)],
}
_CPU_TOKENS = 256


@dataclass
class Proof:
    """One precision on one backend. untested: why not, or empty."""

    precision: str
    backend: str
    findings: list[Finding] = field(default_factory=list)
    untested: str = ""

    @property
    def faults(self) -> list[Finding]:
        """The findings that are faults."""
        return [finding for finding in self.findings if finding.fault]

    def row(self) -> list[str]:
        """Of the table of comparisons."""
        if self.untested:
            return [self.precision, self.backend, f"not tested: {self.untested}", *["-"] * 4]
        lost = [bool(finding.fault) for finding in self.findings if finding.what == "NaN and inf"]
        arrive = "-" if not lost else "NO" if any(lost) else "yes"
        errors = []
        for gemm in GEMMS:
            found = [f.measured for f in self.findings if f.what == f"{gemm} product" and f.measured is not None]
            errors.append(f"{max(found):.1e}" if found else "-")
        compared = f"{len(self.findings)}, {len(self.faults)} faults"
        return [self.precision, self.backend, compared, arrive, *errors]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    known = sorted(path.stem for path in (CONFIGS / "precision").glob("*.yaml"))
    parser = argparse.ArgumentParser(prog="prove_backend.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of pretrain.py, such as model=hybrid_60m")
    default = ["nvfp4", "mxfp4", "mxfp8", "fp8_block"]
    parser.add_argument("--precision", nargs="+", choices=known, default=default)
    parser.add_argument("--backend", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    """Prove, print the Markdown block, and return the exit code."""
    options = parse(arguments)
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
            print(f"{name}, {backend_name} ...", file=sys.stderr, flush=True)
            backend = backend_for(config, backend_name, device.type) if cases[name] else "it quantizes no linear"
            if isinstance(backend, str):
                proofs.append(Proof(name, backend_name, untested=backend))
            else:
                found = [finding for case in cases[name] for finding in findings(backend, case, device)]
                proofs.append(Proof(name, backend_name, found))
    print(report(proofs))
    return 1 if any(proof.faults for proof in proofs) else 0


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
    tokens, ranks = config.train.micro_batch_size * config.train.sequence_length, config.parallel.tensor
    tokens = min(tokens, _CPU_TOKENS) if device_type == "cpu" else tokens
    cases: dict[Case, None] = {}
    for row in (row for row in plans_of(config, models)[0].rows if row.recipe.quantized):
        linear, (of_inputs, of_outputs) = row.linear, (ranks, 1) if row.linear.input_sharded else (1, ranks)
        shape = linear.in_features // of_inputs, linear.out_features // of_outputs, max(1, linear.groups // of_outputs)
        cases[Case(tokens, *shape, row.recipe)] = None
    return list(cases)


def findings(backend: Backend, case: Case, device: torch.device) -> list[Finding]:
    """All comparisons; a kernel that fails is a fault too."""
    found = check(backend, case, device)
    if backend.draws_ours and not any(finding.what == "kernels" for finding in found):
        fair = fairness_of(backend, case, padded_tensors(backend, case, device))
        found += [Finding(case, label, fault) for label, fault in fair]
    return found


def report(proofs: list[Proof]) -> str:
    """The Markdown block."""
    faults = [f"- {proof.backend}: {finding}" for proof in proofs for finding in proof.faults]
    parts = [
        f"### Proof of the backends on {machine()}",
        f"**{len(faults)} faults.**" if faults else "All that was tested agrees.",
        "\n".join(faults),
        table([["what", "is"], *map(list, surroundings().items())]),
        "Comparisons with the reference; largest relative error of each product against FP64 (fprop and dgrad are "
        "rounded to BF16, which alone is 1.7e-03):",
        table([["precision", "backend", "comparisons", "NaN, inf arrive", *GEMMS], *(proof.row() for proof in proofs)]),
    ]
    return "\n\n".join(part for part in parts if part)


def table(rows: list[list[str]]) -> str:
    """A Markdown table, its first column to the left and the others to the right."""
    rows.insert(1, ["---", *["---:"] * (len(rows[0]) - 1)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


# Environment variables that change codes, products or kernels begin so.
_VARIABLES = ("NVTE_", "CUBLAS_", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "TRITON_", "CUDA_MODULE_LOADING")


def machine() -> str:
    """The device in one line."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), no CUDA device"


def surroundings() -> dict[str, str]:
    """Versions, torch's switches, and every environment variable that is set and may change bits; of one that holds a
    path only that it is set: reports are passed on."""
    found = {"Python": platform.python_version(), "torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
    if torch.cuda.is_available():
        found["driver"] = str(collect_env.get_nvidia_driver_version(collect_env.run))
    for name in ("triton", "transformer_engine", "nvidia-cublas"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    matmul = torch.backends.cuda.matmul
    return found | {
        **{name: "set" if "/" in value else value for name, value in variables.items()},
        "torch allow_tf32": str(matmul.allow_tf32),
        "torch allow_bf16_reduced_precision_reduction": str(matmul.allow_bf16_reduced_precision_reduction),
    }


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
