"""The weights of linears that were trained in NVFP4: the codes and scales that training multiplied with, and the two
layouts in which serving engines read them.

Training keeps FP32 masters, and fprop's GEMM multiplies by what the recipe makes of them: the master rounded to the
compute dtype, each group of output rows padded to whole blocks, one maximum over the whole packed weight, 16x16 or 1x16
blocks (precision/linear.py, quantization/nvfp4.py). `trained_weight` does the same on one process: blocks are cut
by the model's own groups and the maximum is that of all ranks, so neither depends on the mesh that trained.

Serving formats store one scale for 1x16 elements. A scale of 16x16 elements is repeated on its 16 rows; after that rows
are independent of each other and may be reordered and cut (q, k and v, one amax for the three), and padding rows
dropped, without moving a bit.

For a module `m` with weight [out, in], W its NVFP4 value (`code * block scale * tensor scale`) and a its largest
magnitude (a / 2688 is for recipes that map the largest block scale to 448; with four-over-six, 256, it is a / 1536):

    ModelOpt                                 compressed-tensors, nvfp4-pack-quantized
    m.weight          uint8 [out, in / 2]    m.weight_packed        the same bytes; low nibble = even column
    m.weight_scale    E4M3 [out, in / 16]    m.weight_scale         the same bytes; one row after the other
    m.weight_scale_2  FP32 [], a / 2688      m.weight_global_scale  FP32 [1], 2688 / a
    m.input_scale     FP32 [], x / 2688      m.input_global_scale   FP32 [1], 2688 / x

x is the largest input of the module, measured by calibration.py; without it the last row is absent and activations stay
in BF16 (W4A16). Scales are neither swizzled nor padded: engines do that when they load. Each tensor scale is one
division of its maximum; the inverse of the other layout's may be an ulp off.

Read: nvidia-modelopt 0.47.0 (`modelopt/torch/quantization/qtensor/nvfp4_tensor.py`,
`modelopt/torch/export/{quant_utils,convert_hf_config}.py`); compressed-tensors 0.20.0 (`compressors/nvfp4/`,
`quantization/quant_scheme.py`); vLLM (`model_executor/layers/quantization/modelopt.py`,
`compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py`, `compressed_tensors/utils.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exchange.architectures import Sections
from exchange.checkpoint import Checkpoint
from megatron_fp4.precision.linear import LinearCall, LinearContext
from megatron_fp4.precision.plan import Plan, PlannedLinear, plan_in_effect
from megatron_fp4.precision.recipe import FPROP_WEIGHT
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale
from megatron_fp4.quantization.rounding import E4M3_MAX
from megatron_fp4.quantization.tensor import NVFP4Tensor, tensor_decode_scale

_BLOCK = 16
# Of a weight that are quantized together: its temporaries are several FP32 copies.
_CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class TrainedPlan:
    """Which recipe each linear of a checkpoint has, and how its run computed.

    compute_dtype: of the run. tensor: its tensor-parallel ranks. before_switch: whether the plan is one that the
    checkpoint has left.
    """

    plan: Plan
    compute_dtype: torch.dtype
    tensor: int = 1
    before_switch: bool = False

    def fp4(self) -> dict[str, PlannedLinear]:
        """The linears whose weight fprop multiplies in NVFP4, by name."""
        return {row.linear.name: row for row in self.plan.rows if row.recipe[FPROP_WEIGHT].format == "nvfp4"}

    def others(self) -> dict[str, str]:
        """The linears whose forward pass is quantized, but not in NVFP4: name -> format of the weight."""
        formats = {row.linear.name: row.recipe[FPROP_WEIGHT].format for row in self.plan.rows}
        return {name: form for name, form in formats.items() if form not in ("nvfp4", "bf16")}


def trained_plan(checkpoint: Checkpoint, plans: tuple[Plan, Plan | None], which: str = "now") -> TrainedPlan:
    """The plan by which the weights of a checkpoint are to be quantized.

    plans: of its configuration, before and after the precision switch. which: `now`, the plan in effect; `before`,
    after a switch, the one before it.
    Raises ValueError, one line with the remedy, where nothing can be exported as trained, and if the plan is not the
    one that was saved with the checkpoint (a plan file has changed since).
    """
    if checkpoint.weights_only:
        raise ValueError(f"{checkpoint.folder} has imported weights, which no run has trained; use --format hf")
    config, switched_at = checkpoint.config, checkpoint.trainer["switch"]["switched_at"]
    in_effect = plan_in_effect(plans, switched_at)
    saved, now = checkpoint.trainer["plan"], in_effect.as_dict()
    for name, linear in now["linears"].items():
        then = saved["linears"].get(name)
        if then is None or saved["recipes"][then["recipe"]] != now["recipes"][linear["recipe"]]:
            raise ValueError(
                f"{name} was trained otherwise than the configuration of {checkpoint.folder} says now; restore its "
                f"precision.bf16_blocks.file, or use the version that trained it"
            )
    if which == "before" and not switched_at:
        raise ValueError(
            "--plan before: no precision switch came between the first step and this checkpoint; leave it out"
        )
    dtype, tensor = getattr(torch, config.precision.compute_dtype), config.parallel.tensor
    before = TrainedPlan(plans[0], dtype, tensor, before_switch=True)
    chosen = before if which == "before" else TrainedPlan(in_effect, dtype, tensor)
    if switched_at and not chosen.fp4() and before.fp4():
        raise ValueError(
            f"this checkpoint is after the precision switch (before step {switched_at + 1}), and its forward pass has "
            "no NVFP4 weights any more; give an earlier checkpoint, --format hf, or --plan before (the plan before the "
            "switch; not what the last steps multiplied with)"
        )
    if problem := refusal(chosen):
        raise ValueError(f"{problem}; export BF16 weights (--format hf)")
    return chosen


def refusal(trained: TrainedPlan) -> str | None:
    """Why the weights cannot be written as they were multiplied; None if they can."""
    if not trained.fp4():
        formats = sorted(set(trained.others().values())) or ["bf16"]
        return f"no linear was trained with NVFP4 weights (they are in {' and '.join(formats)})"
    for name, row in trained.fp4().items():
        recipe = row.recipe
        if recipe[FPROP_WEIGHT].rounding == "stochastic":
            return f"{name}: {row.key}.fprop.weight.rounding=stochastic draws other codes in every step"
        if recipe.fprop.rht:
            return (
                f"{name}: {row.key}.fprop.rht={recipe.fprop.rht} transforms the weights, which no serving engine does"
            )
        if recipe.amax != "global" and trained.tensor > 1:
            return (
                f"{name}: {row.key}.amax={recipe.amax} gave each of {trained.tensor} tensor-parallel ranks a tensor "
                "scale of its own, and the format has one for the weight"
            )
        if row.linear.in_features % _BLOCK:
            return f"{name} has {row.linear.in_features} input features, no multiple of {_BLOCK}"
    return None


def trained_weight(weight: Tensor, row: PlannedLinear, compute_dtype: torch.dtype) -> NVFP4Tensor:
    """What fprop's GEMM multiplies for the FP32 master `weight` [out, in], in its own row order, without padding.

    Codes and scales as `NVFP4Tensor` has them in blocks of 1x16. Raises ValueError for NaN or inf.
    """
    call = _call(weight, row, compute_dtype)
    padded = call.pad_rows(call.weight).contiguous()
    amax = padded.abs().amax().to(torch.float32)
    if not amax.isfinite():
        raise ValueError(f"{row.linear.name} has NaN or inf in its weight; give an earlier checkpoint")
    codes, scales = [], []
    for part in padded.split(max(_BLOCK, _CHUNK_ELEMENTS // padded.shape[1] // _BLOCK * _BLOCK)):
        encoded = row.recipe[FPROP_WEIGHT].encode(part.to(torch.float32), None, amax)
        codes.append(encoded.codes)
        scales.append(encoded.scales.view(torch.uint8))
    own, stored = (call.unpad_rows(torch.cat(parts)).contiguous() for parts in (codes, scales))
    assert isinstance(encoded, NVFP4Tensor)
    stored, scale_max = stored.view(torch.float8_e4m3fn), encoded.scale_max
    return NVFP4Tensor(own, stored, (1, _BLOCK), amax=amax, scale_max=scale_max)


def multiplied_weight(weight: Tensor, row: PlannedLinear, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Asks the linear's own backend: FP32 `code * block scale` [out, in] and the FP32 0-dim tensor scale of the operand
    that it hands to fprop's GEMM. Arguments as of `trained_weight`."""
    call = _call(weight, row, compute_dtype)
    operand, _ = call.weight_operands()
    assert operand.quantized and operand.scale is not None
    return call.unpad_rows(operand.unpacked()).to(torch.float32), operand.scale


def _call(weight: Tensor, row: PlannedLinear, compute_dtype: torch.dtype) -> LinearCall:
    """A call of the linear as one rank that holds all of it makes it, with no tokens."""
    context = LinearContext(row.linear.name, row.recipe, num_groups=row.linear.groups)
    return LinearCall(context, weight, weight.new_empty(0, weight.shape[1], dtype=compute_dtype))


def reordered(tensor: NVFP4Tensor, rows: Tensor) -> NVFP4Tensor:
    """Its rows `rows` (int64), under the amax of the whole."""
    scales = tensor.scales.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    return NVFP4Tensor(tensor.codes[rows], scales, tensor.block, amax=tensor.amax, scale_max=tensor.scale_max)


@dataclass(frozen=True)
class Layout:
    """What a layout calls its tensors in a module. name: as in `--format nvfp4-<name>`. inverse: whether the tensor
    scale is stored as what divides the codes."""

    name: str
    codes: str
    weight_scale: str
    input_scale: str
    inverse: bool
    scales: str = "weight_scale"

    def values(self, decoded: Tensor, stored: Tensor) -> Tensor:
        """FP32 weights, from `code * block scale` and the tensor scale as it is stored."""
        return decoded / stored if self.inverse else decoded * stored

    def names(self, module: str) -> list[str]:
        """Of the codes, block scales and tensor scale of `module`."""
        return [f"{module}.{kind}" for kind in (self.codes, self.scales, self.weight_scale)]

    def stored_scale(self, amax: Tensor, scale_max: float) -> Tensor:
        """The tensor scale of what is at most `amax` large, as it is stored."""
        if self.inverse:  # one element, not zero dimensions: compressed-tensors divides by a scalar in BF16
            return encode_tensor_scale(amax, scale_max).reshape(1)
        return tensor_decode_scale(amax, scale_max).clone()

    def tensors(self, module: str, weight: NVFP4Tensor, largest_input: Tensor | None) -> dict[str, Tensor]:
        """All tensors of `module`, by their full names. largest_input: FP32 0-dim; None leaves activations in BF16."""
        scale = self.stored_scale(weight.amax, weight.scale_max)
        found = dict(zip(self.names(module), (weight.codes, weight.scales, scale), strict=True))
        if largest_input is not None:
            found[f"{module}.{self.input_scale}"] = self.stored_scale(largest_input, E4M3_MAX)
        return found


MODELOPT = Layout("modelopt", "weight", "weight_scale_2", "input_scale", inverse=False)
"""As NVIDIA's ModelOpt exports: read by vLLM and TensorRT-LLM."""
COMPRESSED_TENSORS = Layout(
    "compressed-tensors", "weight_packed", "weight_global_scale", "input_global_scale", inverse=True
)
"""As llm-compressor exports (`nvfp4-pack-quantized`): read by vLLM, SGLang and transformers."""
LAYOUTS = {layout.name: layout for layout in (MODELOPT, COMPRESSED_TENSORS)}


def excluded_modules(sections: Sections, quantized: Collection[str]) -> list[str]:
    """The modules with weights of more than one dimension that are not in `quantized` (linears, by our names), which
    engines could otherwise take for quantized ones: linears in BF16, the head, and convolutions, which some engines
    compute by a class for linears. Not the embedding."""
    left_out = {"embedding", *quantized}
    plain = [parts for name, parts in sections.items() if name.removesuffix(".weight") not in left_out]
    return [part.module for parts in plain for part in parts if len(part.shape) > 1]


def quantization_config(layout: Layout, excluded: Collection[str], calibrated: bool) -> dict[str, Any]:
    """config.json's `quantization_config`. calibrated: whether there are scales of inputs. excluded: full names of
    modules in BF16, listed one by one, because engines match them as wildcards, substrings or regular expressions,
    and `layers.1` would also take `layers.10`.
    """
    operand: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": _BLOCK, "dynamic": False}
    if layout is MODELOPT:
        inputs = {"input_activations": operand} if calibrated else {}
        return {
            "config_groups": {"group_0": {"weights": operand, "targets": ["Linear"]} | inputs},
            "ignore": [*excluded],
            "quant_algo": "NVFP4" if calibrated else "W4A16_NVFP4",
            # The exporter whose layout it is; readers switch on it to know how old a folder is.
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quant_method": layout.name,
        }
    operand |= {"strategy": "tensor_group", "symmetric": True}
    dynamic = {**operand, "dynamic": "local"} if calibrated else None  # of blocks, below a fixed tensor scale
    return {
        "quant_method": layout.name,
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": [_expression(name) for name in excluded],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": operand, "input_activations": dynamic}},
    }


def _expression(module: str) -> str:
    """For one module, whatever stands before its layers: files have `backbone.layers`, programs `model.layers`."""
    _, found, rest = module.partition("layers.")
    return rf"re:.*layers\.{re.escape(rest)}$" if found else module


def hf_quant_config(config: dict[str, Any]) -> dict[str, Any]:
    """ModelOpt's file of that name beside config.json, from its `quantization_config`."""
    quantization = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": _BLOCK,
        "exclude_modules": config["ignore"],
    }
    return {"producer": config["producer"], "quantization": quantization}


def layout_of(config: dict[str, Any]) -> Layout | None:
    """The layout of a folder by its config.json; None for one that is not quantized. Raises ValueError for others."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method not in LAYOUTS:
        raise ValueError(f"its quantization_config.quant_method is {method!r}, not one of {', '.join(LAYOUTS)}")
    return LAYOUTS[method]


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """FP32 `code * block scale` [out, in], which is exact, by the formats' definitions, apart from what writes them.

    E2M1 (OCP MX 1.0, section 5.3.3): codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6, bit 3 is the sign; two codes a byte,
    the low nibble first. codes: uint8 [out, in / 2]. scales: E4M3 [out, in / 16].

    Raises ValueError for other types, or shapes that do not belong together.
    """
    if codes.dtype != torch.uint8 or scales.dtype != torch.float8_e4m3fn:
        raise ValueError(f"codes are {codes.dtype} and scales {scales.dtype}, not uint8 and float8_e4m3fn")
    rows, columns = codes.shape[0], codes.shape[1] * 2
    if tuple(scales.shape) != (rows, columns // _BLOCK) or columns % _BLOCK:
        raise ValueError(f"scales are {list(scales.shape)} for {rows} x {columns} codes")
    values = _PAIRS[codes.long()].view(rows, columns // _BLOCK, _BLOCK)
    return (values * scales.to(torch.float32)[..., None]).view(rows, columns)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# FP32 [256, 2]: the two values of each byte.
_PAIRS = torch.tensor([[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)])
