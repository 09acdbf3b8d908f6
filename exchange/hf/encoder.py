"""What becomes of a parameter's numbers in a folder: written plainly in one type, or (exchange/nvfp4.py) as codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from exchange.hf.sections import Section

IN_TRANSFORMERS = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
print(tokenizer.decode(model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=32)[0]))
```"""


class Stored(NamedTuple):
    """A tensor of a folder: its name, type and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class Encoder(Protocol):
    """Turns our parameters into the tensors of a folder, one at a time."""

    @property
    def description(self) -> str:
        """For the model card: what the weights are written as, in a sentence."""

    @property
    def use(self) -> str:
        """For the model card: how the folder is loaded, in Markdown."""

    def layout(self, name: str, sections: Sequence[Section]) -> list[Stored]:
        """What our parameter `name` becomes, before it is read."""

    def tensors(self, name: str, sections: Sequence[Section], ours: Tensor) -> dict[str, Tensor]:
        """The tensors of `layout` from the whole parameter: FP32 on the CPU, our order of rows."""

    def config_entries(self) -> dict[str, Any]:
        """More for config.json."""

    def extra_files(self) -> dict[str, bytes]:
        """More files of the folder."""


class PlainEncoder:
    """Every tensor in `dtype`, but FP32 where rounding is not allowed (A_log, D, dt_bias).

    dtypes: published name -> another dtype, as an imported folder had it.
    """

    def __init__(self, dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        self.dtype, self._dtypes = dtype, dict(dtypes or {})

    @property
    def description(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"The FP32 master weights, in {name}; A_log, D and dt_bias in float32."
            if name != "float32"
            else ("The FP32 master weights.")
        )

    @property
    def use(self) -> str:
        return IN_TRANSFORMERS

    def layout(self, name: str, sections: Sequence[Section]) -> list[Stored]:
        return [Stored(section.name, self._dtype(section), section.shape) for section in sections]

    def tensors(self, name: str, sections: Sequence[Section], ours: Tensor) -> dict[str, Tensor]:
        return {
            section.name: section.published(ours).to(self._dtype(section)).reshape(section.shape)
            for section in sections
        }

    def config_entries(self) -> dict[str, Any]:
        return {"dtype": str(self.dtype).removeprefix("torch.")}

    def extra_files(self) -> dict[str, bytes]:
        return {}

    def _dtype(self, section: Section) -> torch.dtype:
        return self._dtypes.get(section.name, torch.float32 if section.fp32 else self.dtype)
