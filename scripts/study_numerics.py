"""Measure what each number format and each part of the recipe does; the tables and pictures of docs/numerics.md.

    python scripts/study_numerics.py                                  everything, a few minutes on one CPU core
    python scripts/study_numerics.py --only rounding exactness        two of the sections
    python scripts/study_numerics.py --page docs/numerics.md          also put the tables into the page
    python scripts/study_numerics.py --checkpoint runs/a/checkpoints/step_00000300
    python scripts/study_numerics.py --quick                          seconds, to see that it works

Tables are printed as Markdown, pictures go to --pictures. Tensors of a real model come from the tiny model, which is
trained here for some steps of the built-in data in NVFP4, or from --checkpoint. `--set key=value` changes that run
(model.vocab_size=512, train.steps=300). The same command on the same machine gives the same numbers; on another, the
trained model differs in the last bits of its BF16 products, and the captured rows in their last digits.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # assembly.py is no package

from assembly import CONFIGS, Run, build, configure, set_determinism
from megatron_fp4.config import Bf16BlocksConfig
from megatron_fp4.parallel.mesh import build_mesh, init_distributed
from megatron_fp4.precision.emulated import GemmOperand, gemm, quantize_operand
from megatron_fp4.precision.plan import apply_plan, build_plan
from megatron_fp4.precision.probe import GEMMS, Probe
from megatron_fp4.precision.recipe import Operand, recipe_from_config
from megatron_fp4.quantization import (
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    random_hadamard_transform,
    rounding_key,
)
from megatron_fp4.quantization.diagnostics import operand_statistics, operand_sums
from megatron_fp4.quantization.formats import E2M1_MAX, FP32_MAX, round_e2m1_nearest, to_e4m3
from megatron_fp4.quantization.hadamard import HADAMARD_SIZES
from megatron_fp4.quantization.tensor import block_amax
from megatron_fp4.saved_config import config_from_saved
from megatron_fp4.training.checkpoint_files import DamagedCheckpointError, read_manifest
from megatron_fp4.training.step import train_step

if TYPE_CHECKING:
    from megatron_fp4.precision.linear import _Call

FORMATS = {
    "NVFP4 1x16": Operand("nvfp4", (1, 16)),
    "NVFP4 16x16": Operand("nvfp4", (16, 16)),
    "NVFP4 1x16 4/6": Operand("nvfp4", (1, 16), four_over_six=True),
    "MXFP4 1x32": Operand("mxfp4", (1, 32)),
    "FP8 1x128": Operand("fp8", (1, 128)),
    "FP8 128x128": Operand("fp8", (128, 128)),
    "FP8 1x128, 2^k": Operand("fp8", (1, 128), power_of_two_scales=True),
}
UNCOMMON = ("FP8 128x128", "FP8 1x128, 2^k")
NEAREST, STOCHASTIC = Operand("nvfp4", (1, 16)), Operand("nvfp4", (1, 16), "stochastic")
SQUARE = Operand("nvfp4", (16, 16))

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers differ too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Size:
    """How much to compute. side: of synthetic tensors. draws: quantizations that are averaged. tensors: random
    tensors whose codes are compared."""

    side: int = 1024
    steps: int = 120
    tokens: tuple[int, int] = (4, 256)
    draws: int = 1024
    tensors: int = 4000
    depths: tuple[int, ...] = (1, 4, 16, 32)


QUICK = Size(side=256, steps=2, tokens=(2, 64), draws=8, tensors=200, depths=(1, 4))


@dataclass
class Study:
    """What the sections share. Captured tensors, made at first use: linear -> x, W, dy, BF16, rows by features."""

    size: Size
    pictures: Path
    overrides: list[str]
    checkpoint: Path | None
    _run: tuple[Run, dict[str, dict[str, Tensor]], dict[str, dict[str, float]]] | None = field(default=None)

    @property
    def captured(self) -> dict[str, dict[str, Tensor]]:
        """One linear of each kind of block: its x [tokens, in], W [out, in] and dy [tokens, out]."""
        tensors = self._trained()[1]
        firsts = [[n for n in tensors if n.endswith(end)][:1] for end in ("0.mixer.out_proj", "down_proj", "qkv_proj")]
        return {name: tensors[name] for first in firsts for name in first}

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        """Relative error of fprop, dgrad and wgrad of every linear, all of them quantized."""
        return self._trained()[2]

    def _trained(self) -> tuple[Run, dict[str, dict[str, Tensor]], dict[str, dict[str, float]]]:
        if self._run is None:
            run, start = trained_model(self.size, self.overrides, self.checkpoint)
            self._run = run, *look_inside(run, start)
        return self._run


# ---------------------------------------------------------------------------------------------- a model to look into


class Capture:
    """Hangs where a probe hangs, and keeps x, W and dy of each linear's last call."""

    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {}

    def forward(self, call: _Call, x: Tensor, _y: Tensor) -> Capture._Backward:
        """Keep x and W; the answer is told about the backward pass."""
        kept = {"x": x.detach().clone(), "W": call.weight.detach().clone()}
        self.tensors[call.numerics.name] = kept
        return Capture._Backward(kept)

    @dataclass
    class _Backward:
        kept: dict[str, Tensor]

        def backward(self, dy: Tensor, _dx: Tensor | None, _dw: Tensor | None) -> None:
            self.kept["dy"] = dy.detach().clone()


def trained_model(size: Size, overrides: list[str], checkpoint: Path | None) -> tuple[Run, int]:
    """A model trained for `size.steps` steps (or loaded), every linear then quantized; and its number of steps."""
    if checkpoint is not None:
        if not checkpoint.is_dir():
            raise ValueError(f"--checkpoint {checkpoint} is no folder; name one like runs/a/checkpoints/step_00000300")
        steps = read_manifest(checkpoint).step
        saved = json.loads((checkpoint / "trainer.json").read_text())["config"]
        config = config_from_saved(saved, overrides, CONFIGS)
    else:
        micro, length = size.tokens
        own = [f"train.micro_batch_size={micro}", f"train.global_batch_size={micro}", f"train.sequence_length={length}"]
        own += [f"train.steps={size.steps + 4}", "precision=nvfp4", "precision.switch.when=never", "run.device=cpu"]
        config, _ = configure([*own, "data.num_workers=0", *overrides])
        steps = config.train.steps - 4  # of the rest, the measurements below take their batches
    recipe = recipe_from_config(config.precision)
    if not recipe.quantized:
        raise ValueError(f"precision {config.precision.name} quantizes nothing; name a recipe: --set precision=nvfp4")
    device = init_distributed("cpu", config.parallel.timeout_seconds)
    set_determinism(True)
    run = build(config, config.precision, build_mesh(config.parallel, device))
    if checkpoint is not None:
        with torch.no_grad():
            load({"model": run.model.state_dict()}, storage_reader=FileSystemReader(checkpoint))
    else:
        print(f"training {config.model.name} for {steps} steps", file=sys.stderr)
        for step, batches in enumerate(run.loader.steps(0, steps)):
            lr, clip = run.schedule.lr(step, None, 0), config.optimizer.clip_norm
            parts = run.model, run.optimizer.optimizer, batches, run.mesh, run.clock
            train_step(*parts, step=step, lr=lr, clip_norm=clip)
    shapes = [row.linear for row in run.plan.rows]
    apply_plan(run.linears, build_plan(shapes, recipe, Bf16BlocksConfig(), config.model.num_blocks), run.clock)
    return run, steps


def look_inside(run: Run, start: int) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, float]]]:
    """Of one micro-batch each linear's x, W and dy; of four steps (fewer at a run's end) each linear's errors."""
    capture, probe = Capture(), Probe(once=False)
    start = max(0, min(start, run.config.train.steps - 4))
    for number, batches in enumerate(run.loader.steps(start, min(start + 4, run.config.train.steps))):
        with probe.attached(run.linears):
            forward_backward(run, start + number, batches[0])
        if number == 0:
            for numerics in run.linears.values():
                numerics.probe = capture  # type: ignore[assignment]
            forward_backward(run, start, batches[0])
    found = probe.collect(list(run.linears))
    return capture.tensors, {name: one.errors for name, one in found.items()}


def forward_backward(run: Run, step: int, batch: Any) -> None:
    """One micro-batch through the model and back; gradients are thrown away."""
    run.clock.step, run.clock.micro_batch = step, batch.index
    run.model(batch.tokens, batch.targets).backward()
    for parameter in run.model.parameters():
        parameter.grad = None


# ------------------------------------------------------------------------------------------------- tensors and errors


def generator(seed: int) -> torch.Generator:
    """Of synthetic tensors."""
    return torch.Generator().manual_seed(seed)


def synthetic(side: int) -> dict[str, Tensor]:
    """BF16 [side, side]: Gaussian, Student's t with three degrees of freedom, and Gaussian with every 64th column
    multiplied by 30."""
    g = generator(1)
    normal = torch.randn(side, side, generator=g)
    chi_squared = torch.randn(3, side, side, generator=g).square().mean(0)
    channels = torch.randn(side, side, generator=g)
    channels[:, ::64] *= 30
    made = {"Gaussian": normal, "Student t, 3 d.o.f.": normal / chi_squared.sqrt(), "outlier channels": channels}
    return {name: tensor.bfloat16() for name, tensor in made.items()}


def token_outliers(tokens: int, dim: int, scale: float, where: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, dy [tokens, dim], BF16, correlated as in training, and which tokens are outliers: one in 64, by chance, whose
    x or dy (`where`) is `scale` times as large."""
    g = generator(2)
    shared = torch.randn(tokens, 32, generator=g)

    def mixed() -> Tensor:
        signal = shared @ torch.randn(32, dim, generator=g) / math.sqrt(32)
        return signal + 0.3 * torch.randn(tokens, dim, generator=g)

    x, dy = mixed(), mixed()
    outlier = torch.rand(tokens, generator=g) < 1 / 64
    loud = x if where == "x" else dy
    loud[outlier] = scale * (torch.randn(1, dim, generator=g) + 0.3 * torch.randn(int(outlier.sum()), dim, generator=g))
    return x.bfloat16(), dy.bfloat16(), outlier


def quantized(x: Tensor, operand: Operand, rht: int = 0, draw: int = 0) -> GemmOperand:
    """`x` [rows, k] as the emulated backend's operand; `draw` numbers the draws of stochastic rounding."""
    return quantize_operand(x, operand, rht=rht, key=rounding_key("study", draw))


def decoded(x: Tensor, operand: Operand, draw: int = 0) -> Tensor:
    """FP32 real values of `x` after quantization."""
    x, block, rounding, key = x.contiguous(), operand.block, operand.rounding, rounding_key("study", draw)
    if operand.format == "nvfp4":
        return quantize_nvfp4(x, block, rounding, key=key, four_over_six=operand.four_over_six).dequantize()
    if operand.format == "mxfp4":
        return quantize_mxfp4(x, block, rounding, key=key).dequantize()
    return quantize_fp8(x, block, rounding, key=key, power_of_two_scales=operand.power_of_two_scales).dequantize()


def stochastic(operand: Operand) -> Operand:
    """The same with stochastic rounding."""
    return Operand(operand.format, operand.block, "stochastic", operand.four_over_six, operand.power_of_two_scales)


def statistics(x: Tensor, operand: Operand) -> dict[str, float]:
    """SNR in dB, zeroed share and so on (quantization/diagnostics.py) of one quantization of `x`."""
    exact = x.to(torch.float32)
    no_limit = torch.full((x.shape[0], 1), math.inf)
    sums = operand_sums(exact, decoded(x, operand), no_limit).tolist()
    return operand_statistics([*sums, sums[0], x.numel()], [float(exact.abs().max())] * 2, transformed=False)


def relative(result: Tensor, exact: Tensor) -> float:
    """||result - exact|| / ||exact||."""
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def gain(result: Tensor, exact: Tensor) -> float:
    """Slope of the regression of `result` on `exact`: 1 if nothing is lost systematically."""
    result, exact = result.double(), exact.double()
    return float((result * exact).sum() / (exact * exact).sum())


def wgrad(x: Tensor, dy: Tensor, rht: int, draws: int = 1) -> Tensor:
    """dW = dy^T x by the recipe (dy stochastic, x nearest) with a transform of size `rht`, averaged over draws."""
    right = quantized(x.t(), NEAREST, rht)
    products = (gemm(quantized(dy.t(), STOCHASTIC, rht, draw), right, torch.float32) for draw in range(draws))
    return torch.stack(list(products)).mean(0)


# -------------------------------------------------------------------------------------------------------- the sections


def study_formats(study: Study) -> Iterator[tuple[str, str]]:
    """Signal to noise and zeroed values of every format on every kind of tensor."""
    tensors = synthetic(study.size.side)
    for name, kept in study.captured.items():
        tensors |= {f"{short(name)} {which}": tensor for which, tensor in kept.items()}
    nearest = {name: {f: statistics(x, op) for f, op in FORMATS.items()} for name, x in tensors.items()}
    few = [f for f in FORMATS if f not in UNCOMMON]
    random = {name: {f: statistics(x, stochastic(FORMATS[f])) for f in few} for name, x in tensors.items()}
    crest = {name: statistics(x, NEAREST)["crest"] for name, x in tensors.items()}
    rows = [[n, f"{crest[n]:.0f}", *(f"{one['snr_db']:.1f}" for one in nearest[n].values())] for n in tensors]
    yield "snr-nearest", table(["tensor", "crest", *FORMATS], rows)
    rows = [[n, *(f"{random[n][f]['snr_db']:.1f}" for f in few)] for n in tensors]
    yield "snr-stochastic", table(["tensor", *few], rows)
    cell = "{:.1%} / {:.1%}".format
    rows = [[n, *(cell(nearest[n][f]["zeroed"], random[n][f]["zeroed"]) for f in few)] for n in tensors]
    yield "zeroed", table(["tensor", *few], rows)
    draw_formats(nearest, study.pictures / "formats.png")


def study_hadamard(study: Study) -> Iterator[tuple[str, str]]:
    """What the transform does to operands, to wgrad, and to fprop."""
    rows = []
    for name, kept in study.captured.items():
        for which in ("x", "dy"):
            columns = kept[which].t()
            before, after = (statistics(x, NEAREST) for x in (columns, random_hadamard_transform(columns.contiguous())))
            quantities = (("crest", ".1f"), ("zeroed", ".1%"), ("snr_db", ".1f"))
            rows.append([f"{short(name)} {which}ᵀ", *(f"{before[q]:{f}} / {after[q]:{f}}" for q, f in quantities)])
    yield "rht-operands", table(["operand of wgrad", "crest", "zeroed", "SNR, dB"], rows)

    tokens, sizes = 2 * study.size.side, (0, *HADAMARD_SIZES)
    gains: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for where, scale in (("x", 10), ("x", 30), ("x", 100), ("dy", 100)):
        x, dy, outlier = token_outliers(tokens, tokens // 4, scale, where)
        quiet, loud = (dy.double()[rows].t() @ x.double()[rows] for rows in (~outlier, outlier))
        name = f"{where} of 1 token in 64 x{scale}"
        results = [wgrad(x, dy, size, draws=4) for size in sizes]
        gains[name] = [gain(result.double() - loud, quiet) for result in results]
        errors[name] = [relative(result, quiet + loud) for result in results]
    for name, kept in study.captured.items():
        exact = kept["dy"].double().t() @ kept["x"].double()
        errors[short(name)] = [relative(wgrad(kept["x"], kept["dy"], size, draws=4), exact) for size in sizes]
    at = sizes.index(16)
    rows = [
        [n, f"{e[0]:.3f} / {e[at]:.3f}", f"{gains[n][0]:.3f} / {gains[n][at]:.3f}" if n in gains else ""]
        for n, e in errors.items()
    ]
    yield "rht-wgrad", table(["x and dy", "error of dW", "gain of the ordinary tokens' share of dW"], rows)
    header = ["x and dy", "none", *(str(size) for size in HADAMARD_SIZES)]
    yield "rht-size", table(header, [[n, *(f"{g:.3f}" for g in values)] for n, values in gains.items()])
    draw_hadamard(gains, errors, sizes, study.pictures / "hadamard.png")

    rows = []
    weights = {
        "outlier channels x, Gaussian W": (
            synthetic(study.size.side)["outlier channels"],
            synthetic(study.size.side)["Gaussian"],
        )
    }
    weights |= {short(name): (kept["x"], kept["W"]) for name, kept in study.captured.items()}
    for name, (x, w) in weights.items():
        exact = x.double() @ w.double().t()
        plain, turned = (gemm(quantized(x, NEAREST, r), quantized(w, SQUARE, r), torch.float32) for r in (0, 16))
        unlike = relative(weight_seen(w, SQUARE, 16), decoded(w.t(), SQUARE).t())
        rows.append([name, f"{relative(plain, exact):.3f}", f"{relative(turned, exact):.3f}", f"{unlike:.3f}"])
    yield "rht-fprop", table(["x and W", "error of y", "with RHT", "fprop's W against dgrad's, with RHT"], rows)


def study_weights(study: Study) -> Iterator[tuple[str, str]]:
    """What 16x16 blocks cost, and what they keep: one W for the forward and the backward pass."""
    weights = {"Gaussian": synthetic(study.size.side)["Gaussian"]}
    weights |= {f"{short(name)} W": kept["W"] for name, kept in study.captured.items()}
    rows = []
    for name, w in weights.items():
        cells = [name]
        for operand in (NEAREST, SQUARE):
            fprop, dgrad = decoded(w, operand), decoded(w.t(), operand).t()
            moved = float((fprop != dgrad).double().mean())
            cells += [f"{statistics(w, operand)['snr_db']:.1f}", f"{moved:.1%}", f"{relative(dgrad, fprop):.3f}"]
        rows.append(cells)
    parts = ("SNR, dB", "values that differ", "dgrad's W against fprop's")
    yield "weights", table(["W", *(f"{block}: {part}" for block in ("1x16", "16x16") for part in parts)], rows)
    rows = []
    for depth in study.size.depths:
        one, two = (gradient_errors(study.size.side // 4, depth, operand) for operand in (NEAREST, SQUARE))
        rows.append([str(depth), *(f"{e:.3f}" for pair in zip(one, two, strict=True) for e in pair)])
    header = [
        "layers",
        "1x16: against own forward",
        "16x16: against own forward",
        "1x16: against exact",
        "16x16: against exact",
    ]
    yield "chain-rule", table(header, rows)


def study_rounding(study: Study) -> Iterator[tuple[str, str]]:
    """Bias of nearest and stochastic rounding: means of repeated quantizations, and gains."""
    side, draws = study.size.side // 4, study.size.draws
    counts = [2**k for k in range(draws.bit_length()) if 2**k <= draws]
    gaussian = synthetic(side)["Gaussian"].float()
    inside = ~saturated(gaussian)
    everything = torch.ones_like(inside)
    curves = {
        "nearest": mean_errors(gaussian, NEAREST, [1], everything) * len(counts),  # the same each time
        "stochastic": mean_errors(gaussian, STOCHASTIC, counts, everything),
        "stochastic, without saturated values": mean_errors(gaussian, STOCHASTIC, counts, inside),
    }
    shown = [n for n in counts if n in (1, 4, 16, 64, 256, 1024)]
    rows = [[name, *(f"{curve[counts.index(n)]:.4f}" for n in shown)] for name, curve in curves.items()]
    yield "rounding-mean", table(["error of the mean of n quantizations", *(f"n = {n}" for n in shown)], rows)
    draw_means(counts, curves, study.pictures / "rounding.png")

    rows = []
    tensors = synthetic(study.size.side)
    tensors |= {f"{short(name)} dy": kept["dy"] for name, kept in study.captured.items()}
    for name, x in tensors.items():
        exact = x.to(torch.float32)
        small = (exact.abs() <= exact.abs().median()) & (exact != 0)
        nearest = decoded(x, NEAREST)
        random = torch.stack([decoded(x, STOCHASTIC, draw) for draw in range(32)]).mean(0)
        beyond = saturated(exact)
        gains = [f"{gain(q, exact):.4f}" for q in (nearest, random)]
        gains += [f"{gain(random[~beyond], exact[~beyond]):.4f}"]
        gains += [f"{gain(q[small], exact[small]):.3f}" for q in (nearest, random)]
        snr = [statistics(x, operand)["snr_db"] for operand in (NEAREST, STOCHASTIC)]
        rows.append([name, *gains, f"{snr[0] - snr[1]:.2f}", f"{float(beyond.double().mean()):.1%}"])
    header = ["tensor", "gain: nearest", "stochastic", "stochastic, not saturated"]
    header += ["smaller half: nearest", "stochastic", "SNR loss of stochastic, dB", "saturated"]
    yield "rounding-gain", table(header, rows)


def study_layers(study: Study) -> Iterator[tuple[str, str]]:
    """Relative error of the three products of every linear."""
    errors = study.errors
    rows = [[f"`{name}`", *(f"{one[g]:.3f}" for g in GEMMS)] for name, one in errors.items()]
    yield "layers", table(["linear", *GEMMS], rows)
    draw_layers(errors, study.pictures / "layers.png")


def study_exactness(study: Study) -> Iterator[tuple[str, str]]:
    """Where to apply the tensor scale, and which shortcuts move codes."""
    g = generator(5)
    kinds = ("code x block scale", "code x block scale x tensor scale")
    inexact, largest = dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 0.0)
    for _ in range(32):  # the share depends on the bits of the one number that is folded in
        x = quantize_nvfp4(torch.randn(256, 256, generator=g) * float(torch.rand((), generator=g)))
        values = x.block_values()
        for kind, exact in zip(kinds, (values, values * x.decode_scale()), strict=True):
            error = (exact.bfloat16().float() / exact - 1)[values != 0].abs()
            inexact[kind] += float((error > 0).double().mean()) / 32
            largest[kind] = max(largest[kind], float(error.max()))
    rows = [[kind, f"{inexact[kind]:.2%}", f"{largest[kind]:.2%}"] for kind in kinds]
    yield "folding", table(["BF16 operand", "inexact values", "largest error of a value"], rows)

    left = synthetic(study.size.side)["Gaussian"]
    a, b = quantize_nvfp4(left), quantize_nvfp4(left.flip(0))
    exact = (a.block_values().double() @ b.block_values().double().t()) * (a.decode_scale() * b.decode_scale())
    after = gemm(quantized(left, NEAREST), quantized(left.flip(0), NEAREST), torch.float32)
    before = a.dequantize().bfloat16().float() @ b.dequantize().bfloat16().float().t()
    products = {"tensor scales after the product": after, "tensor scales folded into BF16 operands": before}
    rows = [[name, f"{relative(product, exact):.1e}"] for name, product in products.items()]
    yield "accumulation", table(["emulated GEMM, FP32 accumulation", "error against FP64 accumulation"], rows)

    tensors = torch.randn(study.size.tensors, 1024, generator=generator(3)).bfloat16().float()
    right_codes, right_scales = encode_many(tensors, "as specified")
    rows = []
    for order in ORDERS[1:]:
        codes, scales = encode_many(tensors, order)
        touched = (scales != right_scales).any(1) | (codes != right_codes).any(1)
        moved, rescaled = (codes != right_codes).double().mean(), (scales != right_scales).double().mean()
        rows.append([order, f"{float(touched.double().mean()):.1%}", f"{float(rescaled):.3%}", f"{float(moved):.4%}"])
    yield "order", table(["shortcut", "tensors touched", "block scales moved", "codes moved"], rows)


SECTIONS: dict[str, Callable[[Study], Iterator[tuple[str, str]]]] = {
    "formats": study_formats,
    "hadamard": study_hadamard,
    "weights": study_weights,
    "rounding": study_rounding,
    "layers": study_layers,
    "exactness": study_exactness,
}


# ---------------------------------------------------------------------------------------------- parts of the sections

ORDERS = ("as specified", "2688.0 / amax", "block amax / 6 x S", "encode = S / scale")


def encode_many(tensors: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Grid values [n, cols] and block scales [n, cols / 16] of n FP32 tensors [n, cols] at once, each with a tensor
    scale of its own, in the specified order of operations or with one of the shortcuts `ORDERS`."""
    amax = tensors.abs().amax(1, keepdim=True)
    exact = torch.div(torch.full_like(amax, 2688.0), amax)
    tensor_scale = 2688.0 / amax if order == "2688.0 / amax" else exact
    vector_amax = block_amax(tensors, (1, 16))
    sixth = tensor_scale * torch.full_like(tensor_scale, E2M1_MAX).reciprocal()
    unrounded = vector_amax / E2M1_MAX * tensor_scale if order == "block amax / 6 x S" else vector_amax * sixth
    scales = to_e4m3(unrounded.clamp(max=FP32_MAX)).to(torch.float32)
    encode = (
        tensor_scale / scales if order == "encode = S / scale" else (scales * tensor_scale.reciprocal()).reciprocal()
    )
    scaled = tensors.unflatten(1, (-1, 16)) * encode.clamp(max=FP32_MAX)[..., None]
    return round_e2m1_nearest(scaled.clamp(-E2M1_MAX, E2M1_MAX)).flatten(1), scales


def saturated(x: Tensor) -> Tensor:
    """Where FP32 `x` [rows, cols] lies beyond 6 block scales: its block's E4M3 scale was rounded down."""
    tensor_scale = torch.div(torch.full((), 2688.0), x.abs().amax())
    scales = to_e4m3(block_amax(x, (1, 16)) * (tensor_scale * (1 / E2M1_MAX))).to(torch.float32)
    return (x.abs().unflatten(1, (-1, 16)) * tensor_scale > scales[..., None] * E2M1_MAX * (1 + 2**-20)).flatten(1)


def mean_errors(x: Tensor, operand: Operand, counts: list[int], where: Tensor) -> list[float]:
    """Relative error, over the elements `where`, of the mean of n quantizations of `x`, for each n of `counts`."""
    total, errors = torch.zeros_like(x, dtype=torch.float64), []
    for draw in range(counts[-1]):
        total += decoded(x, operand, draw)
        if draw + 1 in counts:
            errors.append(relative(total[where] / (draw + 1), x[where]))
    return errors


def weight_seen(w: Tensor, operand: Operand, rht: int) -> Tensor:
    """The W [out, in] that fprop multiplies by when both operands are transformed: quantized, then turned back."""
    values = decoded(random_hadamard_transform(w.contiguous(), rht), operand)
    # The transform is orthogonal: transforming the identity gives the matrix that undoes it.
    matrix = random_hadamard_transform(torch.eye(rht), rht)
    return (values.unflatten(1, (-1, rht)) @ matrix.t()).flatten(1)


def gradient_errors(dim: int, depth: int, operand: Operand) -> tuple[float, float]:
    """Error of dx of `depth` layers relu(W x) whose W is quantized by `operand` along each GEMM's dot product: against
    the gradient of the function that the forward pass computed, and against that of the unquantized network."""
    g = generator(4)
    weights = [torch.randn(dim, dim, generator=g).bfloat16().float() * math.sqrt(2 / dim) for _ in range(depth)]
    x, dy = torch.randn(64, dim, generator=g), torch.randn(64, dim, generator=g)
    forward = [decoded(w, operand) for w in weights]
    backward = [decoded(w.t(), operand).t() for w in weights]
    ours = gradient(x, dy, forward, backward)
    return relative(ours, gradient(x, dy, forward, forward)), relative(ours, gradient(x, dy, weights, weights))


def gradient(x: Tensor, dy: Tensor, forward: list[Tensor], backward: list[Tensor]) -> Tensor:
    """dx of a stack of relu(W x), with `forward` as its weights on the way up and `backward` on the way down."""
    masks = []
    for w in forward:
        x = x @ w.t()
        masks.append(x > 0)
        x = x * masks[-1]
    for w, mask in zip(reversed(backward), reversed(masks), strict=True):
        dy = (dy * mask) @ w
    return dy


def short(name: str) -> str:
    """`blocks.1 down_proj` of `blocks.1.mixer.down_proj`."""
    return name.replace(".mixer.", " ")


# --------------------------------------------------------------------------------------------------- tables, pictures


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, its first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def fill_page(page: Path, tables: dict[str, str]) -> None:
    """Put each table between `<!-- table: NAME -->` and `<!-- end -->` of `page`; ValueError without them."""
    text = page.read_text()
    for name, content in tables.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, flags=re.DOTALL):
            raise ValueError(f"{page} has no place <!-- table: {name} --> ... <!-- end -->")
        text = re.sub(pattern, lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    page.write_text(text)


def draw_curves(axes: Axes, x: list[Any], curves: dict[str, list[float]], xlabel: str, ylabel: str, title: str) -> None:
    """One line a curve over `x`, and the labels."""
    for (name, values), colour, marker in zip(curves.items(), _COLOURS, _MARKERS, strict=False):
        axes.plot(x, values, marker=marker, color=colour, label=name)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3, which="both")


def draw_formats(found: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """SNR of each format (nearest), a row a tensor."""
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    names, formats = list(found), [f for f in FORMATS if f not in UNCOMMON]
    for form, colour, marker in zip(formats, _COLOURS, _MARKERS, strict=False):
        values = [found[name][form]["snr_db"] for name in names]
        axes.plot(values, range(len(names)), marker, color=colour, markersize=8, label=form, alpha=0.9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("signal to noise, dB (right is better)")
    axes.set_title("Rounding to nearest: error of each format", loc="left")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, columnspacing=1, handletextpad=0.2)
    save(figure, path)


def draw_hadamard(
    gains: dict[str, list[float]], errors: dict[str, list[float]], sizes: tuple[int, ...], path: Path
) -> None:
    """Gain of the ordinary tokens, and error of dW, over the transform's size."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.5), layout="constrained")
    ticks, xlabel = [str(size) if size else "none" for size in sizes], "size of the Hadamard transform"
    left.axhline(1, color="black", linewidth=1, linestyle=":")
    title = "What is left of the ordinary tokens' part of dW"
    draw_curves(left, ticks, gains, xlabel, "gain (1: nothing lost systematically)", title)
    draw_curves(right, ticks, errors, xlabel, "relative error of dW", "Error of dW (four draws averaged)")
    right.set_ylim(0)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def draw_means(counts: list[int], curves: dict[str, list[float]], path: Path) -> None:
    """Error of the mean of n quantizations, beside the line 1/sqrt(n)."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    xlabel = "n, quantizations of the same tensor that are averaged"
    draw_curves(axes, counts, curves, xlabel, "relative error of the mean", "NVFP4 1x16 of a Gaussian tensor")
    start = curves["stochastic"][0]
    axes.plot(counts, [start / math.sqrt(n) for n in counts], ":", color="black", label="1/sqrt(n)")
    axes.loglog()
    axes.legend()
    save(figure, path)


def draw_layers(errors: dict[str, dict[str, float]], path: Path) -> None:
    """Errors of the three products, a group a linear."""
    figure, axes = plt.subplots(figsize=(11, 5), layout="constrained")
    for i, product in enumerate(GEMMS):
        places = [place + 0.27 * (i - 1) for place in range(len(errors))]
        axes.bar(places, [one[product] for one in errors.values()], 0.25, color=_COLOURS[i], label=product)
    axes.set_xticks(range(len(errors)), [short(name) for name in errors], rotation=35, ha="right")
    axes.set_ylabel("relative error of the product")
    axes.set_title("Every linear in NVFP4: error of its products against BF16", loc="left")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(ncols=3, loc="upper left")
    axes.set_ylim(0, 1.2 * max(max(one.values()) for one in errors.values()))
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write and close; without the version of the library that drew it, so that the bytes stay the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


# -------------------------------------------------------------------------------------------------------- the command


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="study_numerics.py", description="The tables and pictures of docs/numerics.md."
    )
    parser.add_argument("--quick", action="store_true", help="small tensors and a hardly trained model")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run")
    parser.add_argument("--checkpoint", type=Path, help="capture tensors from this checkpoint instead of training")
    parser.add_argument("--pictures", type=Path, default=Path("docs/pictures"), help="folder of the PNG files")
    parser.add_argument("--page", type=Path, help="a Markdown page to put the tables into")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="changes to the captured run")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 0, or 2 with a line on stderr for what the user got wrong."""
    options = parse(arguments)
    plt.rcParams["font.size"] = 11
    study = Study(QUICK if options.quick else Size(), options.pictures, options.set, options.checkpoint)
    try:
        tables: dict[str, str] = {}
        for section in options.only:
            for name, content in SECTIONS[section](study):
                tables[name] = content
                print(f"\n{section}: {name}\n\n{content}", flush=True)
        if options.page is not None:
            fill_page(options.page, tables)
    except (ValueError, OSError, DamagedCheckpointError) as error:
        print(f"study_numerics.py: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
