"""What an export writes for a checkpoint that was trained in NVFP4: codes and scales for the linears that were, BF16
for everything else (FP32 for A_log, D and dt_bias)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exchange.hf.encoder import PlainEncoder, Stored
from exchange.hf.sections import Section
from exchange.nvfp4 import TrainedPlan, reordered, trained_weight
from exchange.nvfp4_layouts import Layout
from megatron_fp4.precision.plan import PlannedLinear
from megatron_fp4.quantization.nvfp4 import NVFP4_BLOCKS
from megatron_fp4.quantization.tensor import NVFP4Tensor

_EMBEDDING = "embedding.weight"
_COLUMNS = NVFP4_BLOCKS[0][1]


class NVFP4Encoder:
    """An `Encoder` (exchange/hf/encoder.py).

    layout: whose names and configuration. trained: the plan, as `choose_plan` gives it. sections: of all parameters of
    the model, by our names. input_amax: linear -> FP32 0-dim, the largest magnitude of its input, of every linear in
    `trained.fp4()`; None leaves activations in BF16.
    """

    def __init__(
        self,
        layout: Layout,
        trained: TrainedPlan,
        sections: Mapping[str, Sequence[Section]],
        input_amax: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._layout, self.trained, self._input_amax = layout, trained, input_amax
        self._rows = {f"{name}.weight": row for name, row in trained.fp4().items()}
        assert self._rows.keys() <= sections.keys(), "the plan is of another model"
        assert input_amax is None or input_amax.keys() >= trained.fp4().keys()
        self._plain = PlainEncoder(torch.bfloat16)
        self.quantized = [module_of(section) for name in self._rows for section in sections[name]]
        """The modules with codes, by their published names."""
        self.excluded = excluded_modules(sections, self._rows)
        """The modules with a weight in BF16 that engines could otherwise take for quantized ones."""

    @property
    def description(self) -> str:
        """For the model card."""
        count, rows = len(self.trained.fp4()), self.trained.plan.rows
        made = "that training multiplied with"
        if self.trained.before_switch:
            made = "of the master weights, by the plan before the run's precision switch"
        text = (
            f"{count} of {len(rows)} linears as the NVFP4 codes and scales {made} ({self._layout.name} layout); "
            f"everything else in bfloat16, A_log, D and dt_bias in float32."
        )
        if others := self.trained.others():
            forms = ", ".join(sorted(set(others.values())))
            which = "1 linear that was" if len(others) == 1 else f"{len(others)} linears that were"
            text += f" In bfloat16: {which} trained in {forms}."
        if self._input_amax is not None:
            text += " Input scales are from calibration on held-out text."
        return text

    @property
    def use(self) -> str:
        """For the model card."""
        return self._layout.use

    def layout(self, name: str, sections: Sequence[Section]) -> list[Stored]:
        """What `name` becomes: by the tensors of one row, with the number of rows put in."""
        if name not in self._rows:
            return self._plain.layout(name, sections)
        found = []
        for section in sections:
            rows, columns = section.shape
            one = self._layout.tensors(module_of(section), _one_row(columns), self._amax(self._rows[name]))
            for stored, tensor in one.items():
                shape = (rows, tensor.shape[1]) if tensor.dim() == 2 else tuple(tensor.shape)
                found.append(Stored(stored, tensor.dtype, shape))
        return found

    def tensors(self, name: str, sections: Sequence[Section], ours: Tensor) -> dict[str, Tensor]:
        """The tensors of `layout`. Raises ValueError for NaN or inf."""
        if name not in self._rows:
            return self._plain.tensors(name, sections, ours)
        row = self._rows[name]
        made = trained_weight(ours, row, self.trained.compute_dtype)
        found: dict[str, Tensor] = {}
        for section in sections:
            part = made if section.rows is None else reordered(made, section.rows)
            found |= self._layout.tensors(module_of(section), part, self._amax(row))
        return found

    def config_entries(self) -> dict[str, Any]:
        """The quantization of the folder, for config.json."""
        quantization = self._layout.quantization_config(self.excluded, self._input_amax is not None)
        return {**self._plain.config_entries(), "quantization_config": quantization}

    def extra_files(self) -> dict[str, bytes]:
        """The layout's own."""
        return self._layout.extra_files(self.excluded, self._input_amax is not None)

    def _amax(self, row: PlannedLinear) -> Tensor | None:
        return None if self._input_amax is None else self._input_amax[row.linear.name]


def module_of(section: Section) -> str:
    """The published name of the module whose weight a section is."""
    return section.name.removesuffix(".weight")


def excluded_modules(sections: Mapping[str, Sequence[Section]], quantized: Collection[str]) -> list[str]:
    """The modules with weights of more than one dimension that are not in `quantized` (by our names): linears in BF16,
    the head, and convolutions, which some engines compute by a class for linears. Not the embedding."""
    return [
        module_of(section)
        for name, parts in sections.items()
        for section in parts
        if name not in quantized and name != _EMBEDDING and len(section.shape) > 1
    ]


def _one_row(columns: int) -> NVFP4Tensor:
    scales = torch.zeros(1, columns // _COLUMNS, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return NVFP4Tensor(torch.zeros(1, columns // 2, dtype=torch.uint8), scales, (1, _COLUMNS), torch.ones(()))
