"""The weights of linears that were trained in NVFP4: the codes and scales that training multiplied with, and the two
layouts in which serving engines read them.

Training has FP32 masters, and fprop's GEMM multiplies with what the recipe makes of them: the master is rounded to the
compute dtype, each group of output rows is padded to full blocks, there is one amax for the packed weight, and blocks
are 16x16 or 1x16 (precision/operands.py, quantization/nvfp4.py). `trained_weight` does the same in one process. The
result does not depend on the mesh that trained: blocks follow the model's own groups, and the amax is over all ranks.

Serving formats store one block scale for 1x16 elements. A block scale of 16x16 elements is repeated for its 16 rows.
Rows are then independent, so they can be reordered and split (q, k, v), bit for bit.

For a module `m` with a weight W [out, in] and its amax a (2688 is for recipes that map the largest block scale to 448;
four-over-six maps it to 256, which gives 1536 instead):

    ModelOpt                                 compressed-tensors, nvfp4-pack-quantized
    m.weight          uint8 [out, in / 2]    m.weight_packed        the same bytes; low nibble = even column
    m.weight_scale    E4M3 [out, in / 16]    m.weight_scale         the same bytes; row by row
    m.weight_scale_2  FP32 [], a / 2688      m.weight_global_scale  FP32 [1], 2688 / a
    m.input_scale     FP32 [], x / 2688      m.input_global_scale   FP32 [1], 2688 / x

x is the amax of the module's input (`largest_inputs`); without it the last row is missing and activations stay in BF16
(W4A16). Scales are neither swizzled nor padded; engines do that when they load. Each tensor scale is a single
division; the inverse of the other layout's scale may differ by one ulp.

Sources: nvidia-modelopt 0.47.0 (`modelopt/torch/quantization/qtensor/nvfp4_tensor.py`,
`modelopt/torch/export/{quant_utils,convert_hf_config}.py`); compressed-tensors 0.20.0 (`compressors/nvfp4/`,
`quantization/quant_scheme.py`); vLLM (`model_executor/layers/quantization/modelopt.py`,
`compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py`, `compressed_tensors/utils.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data.provider import open_held_out
from exchange.checkpoint import Checkpoint, load_model
from megatron_fp4.config.schema import Config
from megatron_fp4.parallel.mesh import leave_distributed
from megatron_fp4.precision.operands import LinearCall, LinearContext, Sharding
from megatron_fp4.precision.plan import HEAD, Plan, PlannedLinear, PrecisionController, plan_in_effect
from megatron_fp4.precision.recipe import FPROP_ACTIVATION, FPROP_WEIGHT
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization.nvfp4 import encode_tensor_scale
from megatron_fp4.quantization.rounding import E4M3_MAX
from megatron_fp4.quantization.tensor import NVFP4Tensor, tensor_decode_scale
from models.published import Sections

_BLOCK = 16
# Elements of a weight that are quantized at once; that takes several FP32 copies of them.
_CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class TrainedPlan:
    """The recipe of each linear of a checkpoint, and how its run computed.

    compute_dtype: of the run. tensor: its tensor-parallel size. before_switch: whether the checkpoint is after the
    precision switch and this is the plan before it.
    """

    plan: Plan
    compute_dtype: torch.dtype
    tensor: int = 1
    before_switch: bool = False

    def nvfp4_linears(self) -> dict[str, PlannedLinear]:
        """Those whose codes are exported. Multi-token prediction is not: no calibration runs it."""
        linears = {row.linear.name: row for row in self.plan.rows if row.recipe[FPROP_WEIGHT].format == "nvfp4"}
        return {name: row for name, row in linears.items() if not name.startswith("mtp.")}

    def other_formats(self) -> dict[str, str]:
        """The linears with quantized weights in fprop in another format than NVFP4: name -> format."""
        formats = {row.linear.name: row.recipe[FPROP_WEIGHT].format for row in self.plan.rows}
        return {name: form for name, form in formats.items() if form not in ("nvfp4", "bf16")}


def trained_plan(
    checkpoint: Checkpoint, plans: tuple[Plan, Plan | None], which: str = "now", layout: str = "modelopt"
) -> TrainedPlan:
    """The plan with which to quantize the weights of a checkpoint.

    plans: of its configuration, before and after the precision switch. which: `now` for the plan in effect, `before`
    for the plan before the switch. layout: the name of the one to write.
    Raises ValueError, in one line with the remedy, if the weights cannot be exported as trained, or if the plan differs
    from the one saved with the checkpoint (because a plan file has changed).
    """
    if checkpoint.weights_only:
        raise ValueError(
            f"{checkpoint.folder} has weights that no run has trained; use --format hf (export-gguf: bf16)"
        )
    config, switched_at = checkpoint.config, checkpoint.trainer["switch"]["switched_at"]
    in_effect = plan_in_effect(plans, switched_at)
    saved, now = checkpoint.trainer["plan"], in_effect.as_dict()
    for name, linear in now["linears"].items():
        then = saved["linears"].get(name)
        if then is None or saved["recipes"][then["recipe"]] != now["recipes"][linear["recipe"]]:
            raise ValueError(
                f"{name} was trained with another recipe than in the configuration of {checkpoint.folder} now; restore "
                "its precision.bf16_blocks.file, or use the version that trained it"
            )
    if which == "before" and not switched_at:
        raise ValueError("--plan before: there was no precision switch before this checkpoint; leave it out")
    dtype, tensor = getattr(torch, config.precision.compute_dtype), config.parallel.tensor
    before = TrainedPlan(plans[0], dtype, tensor, before_switch=True)
    chosen = before if which == "before" else TrainedPlan(in_effect, dtype, tensor)
    if switched_at and not chosen.nvfp4_linears() and before.nvfp4_linears():
        raise ValueError(
            f"this checkpoint is after the precision switch (before step {switched_at + 1}), so its forward pass has "
            "no NVFP4 weights; give an earlier checkpoint, --format hf (export-gguf: bf16), or --plan before (the plan "
            "before the switch, which the last steps did not use)"
        )
    if problem := refusal(chosen, layout):
        raise ValueError(f"{problem}; export BF16 weights (--format hf; export-gguf: bf16)")
    return chosen


def refusal(trained: TrainedPlan, layout: str = "modelopt") -> str | None:
    """Why the weights cannot be exported as training multiplied with them; None if they can. layout: its name."""
    if HEAD in trained.nvfp4_linears():
        return "the head was trained in NVFP4, which the layouts do not have"
    if not trained.nvfp4_linears():
        formats = sorted(set(trained.other_formats().values())) or ["bf16"]
        return f"no linear was trained with NVFP4 weights (they are in {' and '.join(formats)})"
    for name, row in trained.nvfp4_linears().items():
        recipe = row.recipe
        if row.linear.experts > 1 and layout != "modelopt":
            return f"{name}: engines read experts in NVFP4 only in ModelOpt's layout (nvfp4), not in {layout}'s"
        if recipe[FPROP_WEIGHT].rounding == "stochastic":
            return f"{name}: {row.key}.fprop.weight.rounding=stochastic gives other codes in every step"
        if recipe.fprop.rht:
            return f"{name}: {row.key}.fprop.rht={recipe.fprop.rht} transforms the weights; no serving engine does that"
        if recipe.amax != "global" and trained.tensor > 1:
            return (
                f"{name}: {row.key}.amax={recipe.amax} gave each of {trained.tensor} tensor-parallel ranks its own "
                "tensor scale, but the format has one for the weight"
            )
        if row.linear.whole is not None:
            return f"{name} has a tensor scale of its own, but engines read one for all of {row.linear.whole.name}"
        if row.linear.in_features % _BLOCK:
            return f"{name} has {row.linear.in_features} input features, which is not a multiple of {_BLOCK}"
    return None


def trained_weight(weight: Tensor, row: PlannedLinear, compute_dtype: torch.dtype) -> NVFP4Tensor:
    """The operand of fprop's GEMM for the FP32 master `weight` [out, in]: codes and scales in blocks of 1x16, in our
    row order, without padding. Raises ValueError for NaN or inf."""
    call = _call(weight, row, compute_dtype)
    padded = call.padding.pad_weight(call.weight).contiguous()
    amax = padded.abs().amax().to(torch.float32)
    if not amax.isfinite():
        raise ValueError(f"{row.linear.name} has NaN or inf in its weight; give an earlier checkpoint")
    codes, scales = [], []
    for part in padded.split(max(_BLOCK, _CHUNK_ELEMENTS // padded.shape[1] // _BLOCK * _BLOCK)):
        encoded = row.recipe[FPROP_WEIGHT].encode(part.to(torch.float32), None, amax)
        codes.append(encoded.codes)
        scales.append(encoded.scales.view(torch.uint8))
    own, stored = (call.padding.groups.unpadded(torch.cat(parts)).contiguous() for parts in (codes, scales))
    assert isinstance(encoded, NVFP4Tensor)
    stored, scale_max = stored.view(torch.float8_e4m3fn), encoded.scale_max
    return NVFP4Tensor(own, stored, (1, _BLOCK), amax=amax, scale_max=scale_max)


def multiplied_weight(weight: Tensor, row: PlannedLinear, compute_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The operand that the linear's own backend passes to fprop's GEMM: `code * block scale`, FP32 [out, in], and the
    tensor scale, FP32 0-dim. Arguments as for `trained_weight`."""
    call = _call(weight, row, compute_dtype)
    operand, _ = call.weight_operands()
    assert operand.quantized and operand.scale is not None
    return call.padding.groups.unpadded(operand.unpacked()).to(torch.float32), operand.scale


def _call(weight: Tensor, row: PlannedLinear, compute_dtype: torch.dtype) -> LinearCall:
    """A call of the linear on one rank that has the complete weight, with no tokens."""
    context = LinearContext(row.linear.name, row.recipe, sharding=Sharding(num_groups=row.linear.groups))
    return LinearCall(context, weight, weight.new_empty(0, weight.shape[1], dtype=compute_dtype))


def reordered(tensor: NVFP4Tensor, rows: Tensor) -> NVFP4Tensor:
    """The rows `rows` (int64) of a tensor, with the amax of the complete tensor."""
    scales = tensor.scales.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    return NVFP4Tensor(tensor.codes[rows], scales, tensor.block, amax=tensor.amax, scale_max=tensor.scale_max)


def largest_inputs(checkpoint: Checkpoint, trained: TrainedPlan, config: Config, num_samples: int) -> dict[str, Tensor]:
    """The amax of the input of each of `trained.nvfp4_linears()` over `num_samples` sequences of each set: FP32.

    Training computes the amax of every tensor in every step; engines that quantize activations (W4A4) need a constant.
    So the model reads held-out text of its run, with weights and activations quantized as in training. Larger inputs
    saturate in the engine. config: of the run, with paths that may be opened. Raises ValueError if a linear was trained
    with activations in another format, there is no held-out text, or an amax is zero or not finite; ValueError or
    OSError for data that cannot be opened.
    """
    if num_samples < 1:
        raise ValueError(f"--calibrate {num_samples}: give 1 or more")
    if any(row.recipe[FPROP_ACTIVATION].format != "nvfp4" for row in trained.nvfp4_linears().values()):
        raise ValueError(
            "--calibrate: some linears with NVFP4 weights were trained with activations in another format; leave "
            "--calibrate out"
        )
    _, sets = open_held_out(replace(config, validation=replace(config.validation, num_samples=num_samples)))
    if not sets:
        raise ValueError("--calibrate: the run has no held-out text (data.validation); leave it out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    largest: dict[str, Tensor] = {}

    def keep(name: str, _: object, inputs: tuple[Tensor, ...]) -> None:
        amax = inputs[0].detach().abs().amax().to(torch.float32)
        largest[name] = torch.maximum(largest[name], amax) if name in largest else amax

    try:
        model = load_model(checkpoint, compute_dtype=trained.compute_dtype, device=device)
        linears = dict(model.linears())
        PrecisionController({name: of.context for name, of in linears.items()}, trained.plan, StepState(seed=0))
        for name in trained.nvfp4_linears():
            linears[name].register_forward_pre_hook(partial(keep, name))
        for batch in (batch for held_out in sets for batch in held_out.batches(1, 0, 1)):
            documents = None if batch.documents is None else batch.documents.to(device)
            with torch.no_grad():
                model(batch.tokens.to(device), documents=documents, num_documents=batch.num_documents)
    finally:
        leave_distributed()
    for name, amax in largest.items():
        if not (amax.isfinite() and amax > 0):
            raise ValueError(f"{name}: the largest input is {float(amax)}, which is no scale; try another checkpoint")
    return {name: amax.cpu() for name, amax in largest.items()}


@dataclass(frozen=True)
class Layout:
    """The names of a layout's tensors in a module. inverse: whether the tensor scale's inverse is stored."""

    name: str
    codes: str
    weight_scale: str
    input_scale: str
    inverse: bool
    scales: str = "weight_scale"

    def values(self, decoded: Tensor, stored: Tensor) -> Tensor:
        """FP32 weights, from `code * block scale` and the stored tensor scale."""
        return decoded / stored if self.inverse else decoded * stored

    def names(self, module: str) -> list[str]:
        return [f"{module}.{kind}" for kind in (self.codes, self.scales, self.weight_scale)]

    def stored_scale(self, amax: Tensor, scale_max: float) -> Tensor:
        if self.inverse:  # with one dimension, because compressed-tensors divides by a 0-dim tensor in BF16
            return encode_tensor_scale(amax, scale_max).reshape(1)
        return tensor_decode_scale(amax, scale_max).clone()

    def tensors(self, module: str, weight: NVFP4Tensor, largest_input: Tensor | None) -> dict[str, Tensor]:
        """All tensors of `module`, by their full names. largest_input: FP32 0-dim; None: activations stay in BF16."""
        scale = self.stored_scale(weight.amax, weight.scale_max)
        tensors = dict(zip(self.names(module), (weight.codes, weight.scales, scale), strict=True))
        if largest_input is not None:
            tensors[f"{module}.{self.input_scale}"] = self.stored_scale(largest_input, E4M3_MAX)
        return tensors


MODELOPT = Layout("modelopt", "weight", "weight_scale_2", "input_scale", inverse=False)
"""The layout of NVIDIA's ModelOpt, for vLLM and TensorRT-LLM."""
COMPRESSED_TENSORS = Layout(
    "compressed-tensors", "weight_packed", "weight_global_scale", "input_global_scale", inverse=True
)
"""The layout of llm-compressor (`nvfp4-pack-quantized`), for vLLM, SGLang and transformers."""
LAYOUTS = {layout.name: layout for layout in (MODELOPT, COMPRESSED_TENSORS)}


def excluded_modules(sections: Sections, quantized: Collection[str]) -> list[str]:
    """The modules that engines must not treat as quantized: linears in BF16, the head, and convolutions (some engines
    compute these with a class for linears). These are all modules with weights of more than one dimension, except the
    embedding and `quantized` (linears, by our names). Engines fuse the experts of a block into one module."""
    left_out = {"embedding", *quantized}
    plain = [parts for name, parts in sections.items() if name.removesuffix(".weight") not in left_out]
    modules = (
        part.module if part.expert is None else part.module.rpartition(f".{part.expert}.")[0]
        for parts in plain
        for part in parts
        if len(part.shape) > 1
    )
    return [*dict.fromkeys(modules)]


def quantization_config(layout: Layout, excluded: Collection[str], calibrated: bool) -> dict[str, Any]:
    """The `quantization_config` of config.json. calibrated: whether there are scales of inputs. excluded: the full
    names of modules in BF16. They are listed one by one, because engines match entries as wildcards, substrings or
    regular expressions, for which `layers.1` also matches `layers.10`.
    """
    operand: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": _BLOCK, "dynamic": False}
    if layout is MODELOPT:
        inputs = {"input_activations": operand} if calibrated else {}
        return {
            "config_groups": {"group_0": {"weights": operand, "targets": ["Linear"]} | inputs},
            "ignore": [*excluded],
            "quant_algo": "NVFP4" if calibrated else "W4A16_NVFP4",
            # The exporter with this layout; readers use its version to handle older folders.
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quant_method": layout.name,
        }
    operand |= {"strategy": "tensor_group", "symmetric": True}
    dynamic = {**operand, "dynamic": "local"} if calibrated else None  # dynamic block scales, fixed tensor scale
    return {
        "quant_method": layout.name,
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": [_expression(name) for name in excluded],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": operand, "input_activations": dynamic}},
    }


def _expression(module: str) -> str:
    """A regular expression for one module, with any prefix: files have `backbone.layers`, programs `model.layers`."""
    _, numbered, rest = module.partition("layers.")
    return rf"re:.*layers\.{re.escape(rest)}$" if numbered else module


def hf_quant_config(config: dict[str, Any]) -> dict[str, Any]:
    """The content of ModelOpt's hf_quant_config.json, from the `quantization_config` of config.json."""
    quantization = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": _BLOCK,
        "exclude_modules": config["ignore"],
    }
    return {"producer": config["producer"], "quantization": quantization}


def layout_of(config: dict[str, Any]) -> Layout | None:
    """The layout of a folder by its config.json; None if it is not quantized. Raises ValueError for another format."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method not in LAYOUTS:
        raise ValueError(f"its quantization_config.quant_method is {method!r}, not one of {', '.join(LAYOUTS)}")
    return LAYOUTS[method]


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """`code * block scale`, FP32 [out, in], exact. By the definitions; no code is shared with the quantization.

    E2M1 (OCP MX 1.0, section 5.3.3): codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign; two codes per byte,
    the low nibble first. codes: uint8 [out, in / 2]. scales: E4M3 [out, in / 16].

    Raises ValueError for other dtypes, or shapes that do not fit together.
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
