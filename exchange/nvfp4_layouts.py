"""The two layouts in which serving engines read NVFP4 weights: names of tensors, and what the configuration says.

For a module `m` with weight [out, in], W its NVFP4 value (`code * block scale * tensor scale`) and a its largest
magnitude (a / 2688 is for recipes that map the largest block scale to 448; with four-over-six, 256, it is a / 1536):

    ModelOpt                                 compressed-tensors, nvfp4-pack-quantized
    m.weight          uint8 [out, in / 2]    m.weight_packed        the same bytes; low nibble = even column
    m.weight_scale    E4M3 [out, in / 16]    m.weight_scale         the same bytes; one row after the other
    m.weight_scale_2  FP32 [], a / 2688      m.weight_global_scale  FP32 [1], 2688 / a
    m.input_scale     FP32 [], x / 2688      m.input_global_scale   FP32 [1], 2688 / x

x is the largest magnitude of the module's input, measured by calibration (exchange/calibration.py); without it the last
row is absent and activations stay in BF16 (W4A16). Scales are neither swizzled nor padded: engines do that when they
load. Each tensor scale is computed from its maximum, one division; the inverse of the other layout's may be an ulp off.

Read: nvidia-modelopt 0.47.0 (`modelopt/torch/quantization/qtensor/nvfp4_tensor.py`,
`modelopt/torch/export/{quant_utils,convert_hf_config}.py`); compressed-tensors 0.20.0 (`compressors/nvfp4/`,
`quantization/quant_scheme.py`); vLLM (`model_executor/layers/quantization/modelopt.py`,
`compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py`, `compressed_tensors/utils.py`).

What is excluded is listed module by module with its full name: engines match these as wildcards, substrings or regular
expressions, and a shorter entry such as `layers.1` would also take `layers.10`.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from exchange.hf.encoder import IN_TRANSFORMERS
from exchange.nvfp4 import inverse_tensor_scale, tensor_scale
from megatron_fp4.quantization.elements import E2M1_MAX, E4M3_MAX
from megatron_fp4.quantization.tensor import NVFP4Tensor

# modelopt's exporter whose layout this is; readers switch on it to know how old a folder is.
_MODELOPT = "0.47.0"
_GROUP = 16
_SCALE_MAX = E2M1_MAX * E4M3_MAX


class Layout(ABC):
    """One layout. name: as in `--format nvfp4-<name>`. codes, scales: what its tensors are called in a module."""

    name: ClassVar[str]
    codes: ClassVar[str]
    weight_scale: ClassVar[str]
    input_scale: ClassVar[str]
    scales: ClassVar[str] = "weight_scale"
    use: ClassVar[str] = "```\nvllm serve .\n```"
    """How a folder is loaded, in Markdown."""

    def tensors(self, module: str, weight: NVFP4Tensor, input_amax: Tensor | None) -> dict[str, Tensor]:
        """All tensors of `module`, by their full names.

        input_amax: FP32 0-dim, the largest magnitude of its input; None where activations are not quantized.
        """
        found = {
            self.codes: weight.codes,
            self.scales: weight.scales,
            self.weight_scale: self.stored_weight_scale(weight),
        }
        if input_amax is not None:
            found[self.input_scale] = self.stored_input_scale(input_amax)
        return {f"{module}.{name}": tensor for name, tensor in found.items()}

    @abstractmethod
    def stored_weight_scale(self, weight: NVFP4Tensor) -> Tensor:
        """The tensor scale as it is stored."""

    @abstractmethod
    def stored_input_scale(self, amax: Tensor) -> Tensor:
        """The input's tensor scale as it is stored, from its largest magnitude."""

    @abstractmethod
    def quantization_config(self, excluded: Iterable[str], calibrated: bool) -> dict[str, Any]:
        """config.json's `quantization_config`. excluded: full names of the linears in BF16. calibrated: whether there
        are input scales."""

    @abstractmethod
    def excludes(self, quantization_config: dict[str, Any], module: str) -> bool:
        """Whether readers take `module` to be in BF16."""

    def extra_files(self, excluded: Iterable[str], calibrated: bool) -> dict[str, bytes]:
        """Files of its own beside config.json."""
        return {}


class ModelOpt(Layout):
    """As NVIDIA's ModelOpt exports: read by vLLM, TensorRT-LLM and, with input scales, SGLang."""

    name, codes, weight_scale, input_scale = "modelopt", "weight", "weight_scale_2", "input_scale"

    def stored_weight_scale(self, weight: NVFP4Tensor) -> Tensor:
        return tensor_scale(weight).clone()

    def stored_input_scale(self, amax: Tensor) -> Tensor:
        return amax.to(torch.float32) / torch.tensor(_SCALE_MAX)

    def quantization_config(self, excluded: Iterable[str], calibrated: bool) -> dict[str, Any]:
        operand = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": _GROUP}
        group: dict[str, Any] = {"input_activations": dict(operand)} if calibrated else {}
        return {
            "config_groups": {"group_0": {**group, "weights": operand, "targets": ["Linear"]}},
            "ignore": sorted(excluded, key=_natural),
            "quant_algo": _algorithm(calibrated),
            "producer": {"name": "modelopt", "version": _MODELOPT},
            "quant_method": "modelopt",
        }

    def excludes(self, quantization_config: dict[str, Any], module: str) -> bool:
        # vLLM: `exclude_module in prefix` after an exact comparison, then as a wildcard.
        return any(_wildcard(entry).search(module) is not None for entry in quantization_config["ignore"])

    def extra_files(self, excluded: Iterable[str], calibrated: bool) -> dict[str, bytes]:
        content = {
            "producer": {"name": "modelopt", "version": _MODELOPT},
            "quantization": {
                "quant_algo": _algorithm(calibrated),
                "kv_cache_quant_algo": None,
                "group_size": _GROUP,
                "exclude_modules": sorted(excluded, key=_natural),
            },
        }
        return {"hf_quant_config.json": (json.dumps(content, indent=2) + "\n").encode()}


class CompressedTensors(Layout):
    """As llm-compressor exports (`nvfp4-pack-quantized`): read by vLLM and by transformers."""

    name, codes, weight_scale = "compressed-tensors", "weight_packed", "weight_global_scale"
    input_scale = "input_global_scale"
    use = f"{Layout.use}\nor, decompressed to BF16 (with compressed-tensors installed):\n\n{IN_TRANSFORMERS}"

    def stored_weight_scale(self, weight: NVFP4Tensor) -> Tensor:
        # One element, not zero dimensions: compressed-tensors divides by a scalar in BF16.
        return inverse_tensor_scale(weight).reshape(1)

    def stored_input_scale(self, amax: Tensor) -> Tensor:
        return (torch.tensor(_SCALE_MAX) / amax.to(torch.float32)).reshape(1)

    def quantization_config(self, excluded: Iterable[str], calibrated: bool) -> dict[str, Any]:
        operand = {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": _GROUP,
            "symmetric": True,
            "dynamic": False,
        }
        # `local`: a tensor scale that was measured, block scales that are computed.
        inputs = {**operand, "dynamic": "local"} if calibrated else None
        return {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "ignore": [_expression(name) for name in sorted(excluded, key=_natural)],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": operand, "input_activations": inputs}},
        }

    def excludes(self, quantization_config: dict[str, Any], module: str) -> bool:
        return any(
            re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module
            for entry in quantization_config["ignore"]
        )


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (ModelOpt(), CompressedTensors())}


def layout_named(form: str) -> Layout:
    """The layout of `--format`: `nvfp4` and `nvfp4-modelopt`, or `nvfp4-compressed-tensors`. Raises ValueError."""
    name = "modelopt" if form == "nvfp4" else form.removeprefix("nvfp4-")
    if name not in LAYOUTS or not form.startswith("nvfp4"):
        known = ", ".join(f"nvfp4-{known}" for known in LAYOUTS)
        raise ValueError(f"--format {form} is no NVFP4 layout; choose nvfp4 (the same as nvfp4-modelopt) or {known}")
    return LAYOUTS[name]


def layout_of(config: dict[str, Any]) -> Layout | None:
    """The layout of a folder by its config.json; None for one that is not quantized. Raises ValueError for others."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method not in LAYOUTS:
        raise ValueError(f"its quantization_config.quant_method is {method!r}, not one of {', '.join(LAYOUTS)}")
    groups, ignored = quantization.get("config_groups"), quantization.get("ignore")
    if not isinstance(groups, dict) or not isinstance(groups.get("group_0"), dict) or not isinstance(ignored, list):
        raise ValueError("its quantization_config has no config_groups.group_0 and ignore, as exports from here have")
    return LAYOUTS[method]


def is_calibrated(quantization_config: dict[str, Any]) -> bool:
    """Whether the folder says that activations are quantized."""
    return quantization_config["config_groups"]["group_0"].get("input_activations") is not None


def _algorithm(calibrated: bool) -> str:
    return "NVFP4" if calibrated else "W4A16_NVFP4"


def _expression(module: str) -> str:
    """For one module, whatever stands before its layers: files have `backbone.layers`, programs `model.layers`."""
    _, found, rest = module.partition("layers.")
    return rf"re:.*layers\.{re.escape(rest)}$" if found else module


def _wildcard(entry: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in entry.split("*")))


def _natural(module: str) -> list[Any]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in module.split(".")]
