"""Is a run in 4 bits healthy? What `analyze_precision.py --health` measures.

Loss curves show damage late or never: weights adapt to a product that is 3% too large, in BF16 too, so branches of a
checkpoint do not tell it. So each linear's three products in one micro-batch of the run are compared with two others,
of the same x, W and dy:

    specified   what the recipe says, in plain PyTorch (megatron_fp4/precision/reference.py), draws included. A backend
                that draws by itself is compared by the size and the bias of its error.
    exact       without quantization. error: ||q - exact|| / ||exact||. bias: <q - exact, exact> / ||exact||^2

and the loss of the same weights in 4 bits with that in BF16. `USUAL` says which errors, biases and gaps sound runs have
(docs/research.md, "Is a run healthy?").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from analysis.statistics import Estimate, estimate
from megatron_fp4.logging.console import counted, markdown
from megatron_fp4.measure.diagnostics import PARTS, LinearMeasurement, Probe, ProbedCall, relative_error
from megatron_fp4.precision.fp32_gradients import local_part
from megatron_fp4.precision.operands import LinearCall, LinearContext
from megatron_fp4.precision.recipe import GEMMS, SLOTS
from megatron_fp4.precision.reference import reference_linear
from megatron_fp4.precision.verify import PRODUCT_ERROR
from megatron_fp4.quantization.rounding import RoundingKey

# By the format of a product's operands, what the error and the bias's magnitude of sound runs stay below. Measured were
# at most 0.24 and 0.034, 0.23 and 0.064, 0.04 and 0.004. USUAL_GAP: percent of the loss, least and most.
USUAL = {"nvfp4": (0.35, 0.06), "mxfp4": (0.4, 0.1), "mxfp8": (0.06, 0.02)}
USUAL_GAP = (-0.3, 0.5)
# For products with other draws or another order of a transform's sums: of the error, relative; of the bias.
_OF_ERROR, _OF_BIAS = 0.05, 0.02
_SHOWN = 4  # reasons
_SLOTS = {slot.name: slot for slot in SLOTS}


class SpecifiedProbe(Probe):
    """Compares products also with the specified ones, of linears that this rank has whole."""

    parts = (*PARTS, *(f"{gemm}_{what}" for gemm in GEMMS for what in ("specified", "difference")))

    def of_call(self, call: LinearCall, x: Tensor) -> ProbedCall:
        return _SpecifiedCall(self, call, x)


class _SpecifiedCall(ProbedCall):
    def forward(self, y: Tensor) -> None:
        self._y = y
        super().forward(y)

    def gradients(self, dy: Tensor, dx: Tensor | None, wgrad: bool) -> None:
        super().gradients(dy, dx, wgrad)
        x, call, padding = self.x, self.call, self.call.padding
        assert x is not None
        w = call.weight
        padded = padding.pad_tokens(x), padding.pad_weight(w), padding.pad(dy)
        y, of_dx, of_dw = reference_linear(*padded, call.recipe, self._key)
        self._dw = padding.unpad_outputs(of_dw.t()).t()
        self._compare("fprop", x, w, self._y, padding.unpad_outputs(padding.unpad_tokens(y)))
        if dx is not None:
            self._compare("dgrad", dy, w.t(), dx, padding.unpad_tokens(of_dx))

    def weight_gradient(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        super().weight_gradient(dy, x, dw)
        self._compare("wgrad", dy.t(), x.t(), local_part(dw), self._dw)

    def _compare(self, gemm: str, a: Tensor, b: Tensor, actual: Tensor, specified: Tensor) -> None:
        if self.call.recipe.gemms[gemm].quantized:
            self._product(f"{gemm}_specified", a, b, specified, None)
            norms = [torch.linalg.vector_norm(t, dtype=torch.float32) for t in (specified, actual - specified)]
            sums = torch.stack([*norms, torch.zeros_like(norms[0])]).to(torch.float64).square()
            self.probe.add(self.call.context.name, f"{gemm}_difference", sums)

    def _key(self, name: str) -> RoundingKey:
        """The key of an operand's draws (unused: of an operand without), or of the signs of a GEMM's transform."""
        call = self.call
        if (slot := _SLOTS.get(name)) is None:
            return call.context.key(call.step, call.micro_batch, name)
        place = call.place(slot.tensor, all_tokens=True)
        return call.context.key(call.step, call.micro_batch, name).at(place.t() if slot.transposed else place)


@dataclass(frozen=True)
class Health:
    """wrong: products that are not as specified. unusual: what else is worse than usual. unknown: what is not
    established. gap: the loss in 4 bits above that in BF16 with the same weights, in percent. compared: products."""

    wrong: list[str]
    unusual: list[str]
    unknown: list[str]
    gap: Estimate
    compared: int

    @property
    def worse(self) -> bool:
        return bool(self.wrong or self.unusual)

    @property
    def verdict(self) -> str:
        if not self.worse and not self.unknown:
            compared = counted(self.compared, "product")
            return f"HEALTHY: {compared} as specified on this machine, errors and loss as usual"
        reasons = list(dict.fromkeys(self.wrong + self.unusual if self.worse else self.unknown))
        more = [f"and {len(reasons) - _SHOWN} more"] if len(reasons) > _SHOWN else []
        return "\n  ".join(["WORSE THAN USUAL" if self.worse else "NOT ESTABLISHED", *reasons[:_SHOWN], *more])


def judge(
    found: Mapping[str, LinearMeasurement],
    contexts: Mapping[str, LinearContext],
    losses: Sequence[tuple[float, float]],
) -> Health:
    """found: by a `SpecifiedProbe`. contexts: by the linear's name. losses: of micro-batches in 4 bits and in BF16."""
    wrong, unusual, unknown = list[str](), list[str](), list[str]()
    for name, of in found.items():
        context = contexts[name]
        for gemm, error in of.errors.items():
            if fault := _fault(of, gemm, context):
                wrong.append(f"{gemm} of {name} {fault}")
                continue
            formats = {operand.format for operand in context.recipe.gemms[gemm].operands if operand.quantized}
            if not formats <= USUAL.keys():
                unknown.append(f"what errors are usual in {context.recipe.name}; products are as specified")
                continue
            most_error, most_bias = max(USUAL[form] for form in formats)
            if not (error <= most_error and abs(of.bias(gemm)) <= most_bias):
                unusual.append(f"{gemm} of {name}: error {error:.3f}, bias {of.bias(gemm):+.3f}")
    gap = estimate([100 * (quantized / plain - 1) for quantized, plain in losses])
    low, high = gap.ends or (-math.inf, math.inf)
    least, most = USUAL_GAP
    if not math.isfinite(gap.mean) or low > most or high < least:
        unusual.append(f"the loss in 4 bits is {gap.text()} above that in BF16")
    elif low < least or high > most:
        unknown.append(f"whether the loss is usual in 4 bits, {gap.text()}: give more --micro-batches")
    return Health(wrong, unusual, unknown, gap, sum(len(of.errors) for of in found.values()))


def report(health: Health, found: Mapping[str, LinearMeasurement]) -> str:
    """The verdict, a row for each GEMM, the loss, and the worst operands."""
    rows = []
    for gemm in GEMMS:
        if errors := {name: of.errors[gemm] for name, of in found.items() if gemm in of.errors}:
            worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
            biases = [found[name].bias(gemm) for name in errors]
            cells = [f"{median(errors.values()):.3f}", f"{errors[worst]:.3f}", worst, f"{median(biases):+.3f}"]
            rows.append([gemm, *cells, f"{max(biases, key=abs):+.3f}"])
    operands = ((name, *operand) for name, of in found.items() for operand in of.operands.items())
    worst_operands = sorted((of["snr_db"], f"{slot} of {name}") for name, slot, of in operands)
    return "\n".join(
        [
            health.verdict,
            "",
            markdown(["GEMM", "error, median", "worst", "linear", "bias, median", "worst"], rows),
            "",
            "usual: " + ", ".join(f"errors to {most[0]} and biases to {most[1]} in {of}" for of, most in USUAL.items()),
            f"       a loss in 4 bits {USUAL_GAP[0]} to {USUAL_GAP[1]}% above BF16's",
            f"loss in 4 bits: {health.gap.text()} above that in BF16 with the same weights",
            "worst operands: " + ", ".join(f"{what} {snr:.1f} dB" for snr, what in worst_operands[:3]),
        ]
    )


def _fault(of: LinearMeasurement, gemm: str, context: LinearContext) -> str:
    """How a product differs from the specified one by more than the order of sums; empty: not at all."""
    part, products = context.recipe.gemms[gemm], of.products
    if not context.backend.draws_ours and (part.rht or any(operand.drawn for operand in part.operands)):
        error, right = of.errors[gemm], relative_error(*products[f"{gemm}_specified"][:2])
        bias, right_bias = of.bias(gemm), of.bias(f"{gemm}_specified")
        if abs(error - right) <= _OF_ERROR * right and abs(bias - right_bias) <= _OF_BIAS:
            return ""
        return f"has error {error:.3f} and bias {bias:+.3f}, specified are {right:.3f} and {right_bias:+.3f}"
    difference = relative_error(*products[f"{gemm}_difference"][:2])
    limit = PRODUCT_ERROR[torch.float32 if gemm == "wgrad" else torch.bfloat16]
    return "" if difference <= limit else f"differs from the specified one by {difference:.1e} of its norm"
