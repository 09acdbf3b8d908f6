"""Compares an exported folder with its checkpoint: every tensor, bit for bit, and the configuration.

Both sides are computed independently of the export: the expected values are the operand that a linear's backend passes
to fprop's GEMM (`multiplied_weight`), and the values in the folder are decoded by the format's definition.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.tokenizer import HuggingFaceTokenizer, TextTokenizer
from exchange import nvfp4
from exchange.architectures import SMALLEST_STEP, sections_of, to_hf
from exchange.checkpoint import Checkpoint
from exchange.hf_export import CONFIG, QUANTIZATION
from exchange.hf_import import Folder
from exchange.tokenizer import check_exported_tokenizer
from megatron_fp4.checkpoint.files import read_plain
from megatron_fp4.precision.plan import PlannedLinear
from megatron_fp4.precision.verify import difference


class Finding(NamedTuple):
    """what: was compared. extent: how much of it, as text. problems: the differences."""

    what: str
    extent: str
    problems: list[str]


class FolderCheck:
    """Compares a folder with the checkpoint that it was exported from.

    trained: the plan of a folder in NVFP4, otherwise None. tokenizer: the run's; None skips the folder's tokenizer.
    """

    def __init__(
        self, folder: Folder, checkpoint: Checkpoint, trained: nvfp4.TrainedPlan | None, tokenizer: TextTokenizer | None
    ) -> None:
        self.folder, self.checkpoint, self.trained, self.tokenizer = folder, checkpoint, trained, tokenizer
        self.sections = sections_of(checkpoint.config.model)
        try:
            group = folder.config["quantization_config"]["config_groups"]["group_0"]
            self.calibrated = group.get("input_activations") is not None
        except (KeyError, TypeError, AttributeError):  # `_exclusions` reports what is wrong
            self.calibrated = False
        self.rows = {} if trained is None else {f"{name}.weight": row for name, row in trained.nvfp4_linears().items()}

    def findings(self) -> Iterator[Finding]:
        """The results of all comparisons. Raises DamagedCheckpointError and ValueError for files that cannot be
        compared."""
        expected, config = to_hf(self.checkpoint.config.model), dict(self.folder.config)
        if config.get("time_step_min") == 0:  # version 0.2
            config["time_step_min"] = SMALLEST_STEP
        yield Finding(CONFIG, f"{len(expected)} keys", _other_keys("", config, expected))
        yield self._presence()
        yield self._plain_tensors()
        if self.trained is not None and (layout := self.folder.layout) is not None:
            yield self._codes(layout, self.trained.compute_dtype)
            if self.calibrated:
                yield self._input_scales(layout)
            yield self._exclusions(layout)
        if self.tokenizer is not None:
            yield self._tokenizer(self.tokenizer)

    def _presence(self) -> Finding:
        expected, layout = set[str](), self.folder.layout
        for name, parts in self.sections.items():
            for part in parts:
                expected |= {*layout.names(part.module)} if layout and name in self.rows else {part.name}
                if layout and name in self.rows and self.calibrated:
                    expected.add(f"{part.module}.{layout.input_scale}")
        problems = [f"{name} is missing" for name in sorted(expected - self.folder.names)]
        problems += [f"{name} belongs to no parameter" for name in sorted(self.folder.names - expected)]
        return Finding("tensors, by name", f"{len(expected)}", problems)

    def _plain_tensors(self) -> Finding:
        problems, count = list[str](), 0
        declared = torch.bfloat16 if self.folder.config.get("dtype") == "bfloat16" else torch.float32
        for name, parts in self.sections.items():
            if name in self.rows:
                continue
            ours = self.checkpoint.tensor(name)
            count += len(parts)
            for part in (part for part in parts if part.name in self.folder.names):
                written = self.folder.tensor(part.name)
                expected = part.published(ours).to(torch.float32 if part.fp32 else declared)
                problems.append(difference(f"elements of {part.name}", written, expected))
        return Finding("tensors in plain types", f"{count}", [*filter(None, problems)])

    def _codes(self, layout: nvfp4.Layout, compute_dtype: torch.dtype) -> Finding:
        """NVFP4 weights are equal once decoded, and modules that engines fuse have the same tensor scale."""
        problems, modules = list[str](), 0
        for name, row in self.rows.items():
            ours, parts = self.checkpoint.tensor(name), self.sections[name]
            for part in parts:
                if part is parts[0] or part.expert is not None:
                    values, scale = self._multiplied(part.matrix(ours), row, layout, compute_dtype)
                modules += 1
                stored = layout.names(part.module)
                if not self.folder.names.issuperset(stored):
                    continue  # `_presence` reports it
                codes, block, tensor = map(self.folder.tensor, stored)
                try:
                    values_in_folder = nvfp4.decoded(codes, block) + 0.0  # the sign of a zero has no effect
                except ValueError as error:
                    problems.append(f"{part.module}: {error}")
                    continue
                expected = replace(part, expert=None).published(values) + 0.0
                problems.append(difference(f"elements of {part.module}, decoded,", values_in_folder, expected))
                problems.append(difference(f"elements of {stored[-1]}", tensor, scale))
        extent = f"{len(self.rows)} linears, {modules} modules"
        return Finding("NVFP4 weights, decoded", extent, [*filter(None, problems)])

    def _multiplied(
        self, master: Tensor, row: PlannedLinear, layout: nvfp4.Layout, compute_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """`multiplied_weight`, with the tensor scale as the layout stores it."""
        values, scale = nvfp4.multiplied_weight(master, row, compute_dtype)
        if layout.inverse:  # the inverse of the GEMM's scale, rounded separately
            amax = master.to(compute_dtype).abs().amax().to(torch.float32)
            largest = 6.0 * (256.0 if row.recipe.fprop.right.four_over_six else 448.0)
            scale = torch.tensor([largest]) / amax if amax > 0 else torch.ones(1)
        return values, scale

    def _input_scales(self, layout: nvfp4.Layout) -> Finding:
        """Scales of inputs are positive numbers, equal for modules that engines fuse (q, k and v)."""
        problems = list[str]()
        for name in self.rows:
            names = [f"{part.module}.{layout.input_scale}" for part in self.sections[name]]
            scales = {name: float(self.folder.tensor(name)) for name in names if name in self.folder.names}
            problems += [f"{name} is {of:.9g}" for name, of in scales.items() if not 0 < of < math.inf]
            if len(set(scales.values())) > 1:
                problems.append(f"{' and '.join(scales)} are not equal")
        return Finding("scales of inputs", f"{len(self.rows)} linears", problems)

    def _exclusions(self, layout: nvfp4.Layout) -> Finding:
        """The configuration excludes exactly the modules without codes, with the names that an export uses."""
        quantized = {name.removesuffix(".weight") for name in self.rows}
        expected = nvfp4.quantization_config(layout, nvfp4.excluded_modules(self.sections, quantized), self.calibrated)
        written = self.folder.config.get("quantization_config") or {}
        ignored = written.get("ignore")
        listed, wanted = {*map(str, ignored if isinstance(ignored, list) else ())}, {*expected["ignore"]}
        problems = [f"{name} is not excluded, though it is in BF16" for name in sorted(wanted - listed)]
        problems += [f"{name} is excluded, though no such module is in BF16" for name in sorted(listed - wanted)]
        same = {key: value for key, value in expected.items() if key not in ("ignore", "producer")}
        problems += _other_keys("quantization_config.", written, same)
        if layout is nvfp4.MODELOPT:
            try:
                beside = json.loads(read_plain(self.folder.path / QUANTIZATION))["quantization"]
            except (OSError, ValueError, KeyError, TypeError):
                beside = None
            if beside != nvfp4.hf_quant_config(expected)["quantization"]:
                problems.append(f"{QUANTIZATION} is missing, or does not match what is quantized here")
        return Finding("what is quantized", f"{len(expected['ignore'])} modules excluded", problems)

    def _tokenizer(self, tokenizer: TextTokenizer) -> Finding:
        path = self.folder.path / "tokenizer.json"
        if not path.is_file():
            return Finding("tokenizer", "", ["tokenizer.json is missing"])
        problems = []
        if isinstance(tokenizer, HuggingFaceTokenizer):
            # An export sets what is added before a text.
            stored, own = ({**json.loads(of), "post_processor": None} for of in (read_plain(path), tokenizer.content))
            if stored != own:
                problems.append(f"tokenizer.json is not {tokenizer.name}, which made the data of the run")
        try:
            check_exported_tokenizer(self.folder.path, self.checkpoint, tokenizer)
        except ValueError as error:
            problems.append(str(error))
        return Finding("tokenizer", f"{tokenizer.vocab_size} tokens", problems)


def _other_keys(prefix: str, found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [
        f"{prefix}{key} is {found.get(key)!r} and should be {value!r}"
        for key, value in expected.items()
        if key not in found or found[key] != value
    ]
