"""Whether an exported folder is what a checkpoint trained: every tensor, bit for bit, and what the configuration says.

What is expected is asked of the linears themselves (`multiplied_weight`: the operand that their backend hands to
fprop's GEMM), and what is there is decoded by the format's definition (`decoded`): neither goes the way that the export
went.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from data.tokenizer import TextTokenizer, load_tokenizer
from exchange.architectures import from_hf, sections_of, to_hf
from exchange.checkpoint import Checkpoint
from exchange.hf_export import CONFIG, QUANTIZATION, excluded_modules
from exchange.hf_import import Folder
from exchange.nvfp4 import (
    MODELOPT,
    Layout,
    TrainedPlan,
    decoded,
    excludes,
    hf_quant_config,
    multiplied_weight,
    quantization_config,
)


class Finding(NamedTuple):
    """what: was compared. extent: how much of it, in words. problems: what differs."""

    what: str
    extent: str
    problems: list[str]


def is_calibrated(folder: Folder) -> bool:
    """Whether activations are quantized too. Raises ValueError for NVFP4 whose configuration exports do not write."""
    if folder.layout is None:
        return False
    try:
        quantization = folder.config["quantization_config"]
        excludes(folder.layout, quantization, "")
        return quantization["config_groups"]["group_0"].get("input_activations") is not None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder.path / CONFIG}: its quantization_config is not one of exports from here") from error


class FolderCheck:
    """Compares a folder with the checkpoint that it was made from.

    trained: by which plan, of a folder in NVFP4. tokenizer: the run's; None does not look at the folder's.
    """

    def __init__(
        self, folder: Folder, checkpoint: Checkpoint, trained: TrainedPlan | None, tokenizer: TextTokenizer | None
    ) -> None:
        self.folder, self.checkpoint, self.trained, self.tokenizer = folder, checkpoint, trained, tokenizer
        self.sections, self.calibrated = sections_of(checkpoint.config.model), is_calibrated(folder)
        self.rows = {} if trained is None else {f"{name}.weight": row for name, row in trained.fp4().items()}

    def findings(self) -> Iterator[Finding]:
        """One kind of thing after the other. Raises DamagedCheckpointError and ValueError for what cannot be read."""
        yield self._configuration()
        yield self._presence()
        yield self._plain_tensors()
        if self.trained is not None and (layout := self.folder.layout) is not None:
            yield self._codes(layout, self.trained.compute_dtype)
            yield self._shared_scales(layout)
            yield self._exclusions(layout)
        if self.tokenizer is not None:
            yield self._tokenizer(self.tokenizer)

    def _configuration(self) -> Finding:
        """Every key that an export writes of the model."""
        model, config = self.checkpoint.config.model, self.folder.config
        try:
            read = from_hf(config)
        except (ValueError, KeyError, TypeError) as error:
            return Finding(CONFIG, "", [f"it is not a configuration of such a model: {error}"])
        have, expected = asdict(model), to_hf(model)
        problems = [f"{k} is {v!r} there and {have[k]!r} in the checkpoint" for k, v in read.items() if have[k] != v]
        problems += _other_keys("", config, expected)
        return Finding(CONFIG, f"{len(expected)} keys", problems)

    def _presence(self) -> Finding:
        """Every tensor is there, and none that belongs to nothing."""
        expected, layout = set[str](), self.folder.layout
        for name, parts in self.sections.items():
            if name not in self.rows:
                expected |= {part.name for part in parts}
                continue
            assert layout is not None
            kinds = [layout.codes, layout.scales, layout.weight_scale, *[layout.input_scale] * self.calibrated]
            expected |= {f"{part.module}.{kind}" for part in parts for kind in kinds}
        problems = [f"{name} is missing" for name in sorted(expected - self.folder.names)]
        problems += [f"{name} belongs to nothing" for name in sorted(self.folder.names - expected)]
        return Finding("tensors, by name", f"{len(expected)}", problems)

    def _plain_tensors(self) -> Finding:
        problems, count = list[str](), 0
        for name, parts in self.sections.items():
            if name in self.rows:
                continue
            ours = self.checkpoint.tensor(name)
            count += len(parts)
            for part in (part for part in parts if part.name in self.folder.names):
                found = self.folder.tensor(part.name)
                declared = "float32" if part.fp32 else self.folder.config.get("dtype")
                if str(found.dtype) != f"torch.{declared}":
                    problems.append(f"{part.name} is {found.dtype} and should be {declared}")
                else:
                    expected = part.published(ours).to(found.dtype)
                    problems += _differences(part.name, found, expected, bits=True)
        return Finding("tensors in plain types", f"{count}", problems)

    def _codes(self, layout: Layout, compute_dtype: torch.dtype) -> Finding:
        problems, modules = list[str](), 0
        for name, row in self.rows.items():
            master = self.checkpoint.tensor(name)
            values, scale = multiplied_weight(master, row, compute_dtype)
            if layout.inverse:  # rounded from the inverse of what the GEMM applies
                amax = master.to(compute_dtype).abs().amax().to(torch.float32)
                largest = 6.0 * (256.0 if row.recipe.fprop.right.four_over_six else 448.0)
                scale = torch.tensor([largest]) / amax if amax > 0 else torch.ones(1)
            for part in self.sections[name]:
                modules += 1
                stored = [f"{part.module}.{kind}" for kind in (layout.codes, layout.scales, layout.weight_scale)]
                if not self.folder.names.issuperset(stored):
                    continue  # reported with the names
                codes, block, tensor = map(self.folder.tensor, stored)
                try:
                    found = decoded(codes, block)
                except ValueError as error:
                    problems.append(f"{part.module}: {error}")
                    continue
                problems += _differences(f"{part.module}, decoded", found, part.published(values))
                problems += _differences(stored[-1], tensor, scale)
        return Finding("NVFP4 weights, decoded", f"{len(self.rows)} linears, {modules} modules", problems)

    def _shared_scales(self, layout: Layout) -> Finding:
        """Modules that engines fuse have one tensor scale, of weights and of inputs; and scales are numbers above 0."""
        problems, fused = list[str](), 0
        for name in self.rows:
            modules = [part.module for part in self.sections[name]]
            fused += len(modules) > 1
            for kind in (layout.weight_scale, layout.input_scale):
                names = [f"{module}.{kind}" for module in modules if f"{module}.{kind}" in self.folder.names]
                found = [self.folder.tensor(each) for each in names]
                if any(not torch.equal(each, found[0]) for each in found):
                    problems.append(f"{', '.join(names)} differ, and engines take the largest for all of them")
                if any(each.dtype != torch.float32 or not (each.isfinite() & (each > 0)).all() for each in found):
                    problems.append(f"{names[0]} is {found[0].tolist()}, no scale")
        return Finding("scales of fused modules", f"{fused} of q, k and v", problems)

    def _exclusions(self, layout: Layout) -> Finding:
        """A module is excluded if and only if it has no codes: by its name in files, and by that in programs."""
        quantization, problems = self.folder.config["quantization_config"], list[str]()
        plain = excluded_modules(self.sections, self.rows)
        quantized = [part.module for name in self.rows for part in self.sections[name]]
        for module in (*quantized, *plain):
            names = {module}
            if layout is not MODELOPT:  # read by transformers under its own names
                names.add(module.replace("backbone.", "model."))
            for name in sorted(names):
                if excludes(layout, quantization, name) != (module in plain):
                    what = "not excluded, though it is in BF16" if module in plain else "excluded, though it has codes"
                    problems.append(f"{name} is {what}")
        expected = quantization_config(layout, plain, self.calibrated)
        same = {key: value for key, value in expected.items() if key not in ("ignore", "producer")}
        problems += _other_keys("quantization_config.", quantization, same)
        if layout is MODELOPT:
            try:
                said = json.loads((self.folder.path / QUANTIZATION).read_text())["quantization"]
            except (OSError, ValueError, KeyError, TypeError):
                said = None
            if said != hf_quant_config(expected)["quantization"]:
                problems.append(f"{QUANTIZATION} is missing or does not say what is quantized here")
        return Finding("what is quantized", f"{len(plain)} excluded, {len(quantized)} not", problems)

    def _tokenizer(self, tokenizer: TextTokenizer) -> Finding:
        path, problems = self.folder.path / "tokenizer.json", list[str]()
        if not path.is_file():
            return Finding("tokenizer", "", ["tokenizer.json is missing"])
        found = load_tokenizer(path, tokenizer.eod_token)
        probe = ["Tokens, 1234 of them:\n\tdef f(x): return  x**2  # naïve 你好"]
        if found.eod_id != tokenizer.eod_id:
            problems.append(f"{tokenizer.eod_token} is {found.eod_id} there and {tokenizer.eod_id} in the run")
        same = list(found.encode_batch(probe)[0]) == list(tokenizer.encode_batch(probe)[0])
        if not same or (found.kind == tokenizer.kind and found.fingerprint() != tokenizer.fingerprint()):
            problems.append(f"tokenizer.json is not {tokenizer.name}, which made the data of the run")
        return Finding("tokenizer", f"{found.vocab_size} tokens", problems)


def _other_keys(prefix: str, found: dict, expected: dict) -> list[str]:
    return [
        f"{prefix}{key} is {found.get(key)!r} and should be {value!r}"
        for key, value in expected.items()
        if key not in found or found[key] != value
    ]


def _differences(name: str, found: Tensor, expected: Tensor, bits: bool = False) -> list[str]:
    """What differs, at most one line. bits: also in the sign of a zero, which a code may have and no product sees."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        have, want = (f"{list(each.shape)} ({each.dtype})" for each in (found, expected))
        return [f"{name} is {have} and should be {want}"]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    other = found.view(integers) != expected.view(integers) if bits else ~(found == expected)
    if not other.any():
        return []
    at = tuple(other.nonzero()[0].tolist())
    values = f"{found[at].item():.9g} and should be {expected[at].item():.9g}"
    return [f"{name}: {int(other.sum())} of {found.numel()} elements differ; {list(at)} is {values}"]
