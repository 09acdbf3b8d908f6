"""Whether an exported folder is what a checkpoint trained: every tensor, bit for bit, and what the configuration says.

What is expected is asked of the linears themselves (`multiplied_weight`: the operand that their backend hands to
fprop's GEMM), and what is there is decoded by the format's definition (`decoded`): neither goes the way that the export
went.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data.tokenizer import TextTokenizer, load_tokenizer
from exchange.architectures import Section, from_hf, sections_of, to_hf
from exchange.checkpoint import Checkpoint
from exchange.hf_export import CONFIG, excluded_modules
from exchange.hf_import import Shards, read_config
from exchange.nvfp4 import TrainedPlan, decoded, is_calibrated, layout_of, multiplied_weight


class Finding(NamedTuple):
    """what: was compared. extent: how much of it, in words. problems: what differs."""

    what: str
    extent: str
    problems: list[str]


class Folder:
    """An exported folder, opened. layout: of its NVFP4 weights, None without any. calibrated: whether activations are
    quantized too. Raises ValueError, in one line, for one that cannot be read as such."""

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, read_config(path)
        try:
            self.layout = layout_of(self.config)
            self.calibrated = self.layout is not None and is_calibrated(self.config["quantization_config"])
            if self.layout is not None:
                self.layout.excludes(self.config["quantization_config"], "")
        except ValueError as error:
            raise ValueError(f"{path / CONFIG}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / CONFIG}: its quantization_config is not one of exports from here") from error
        self.shards = Shards(path)
        self.names = self.shards.names

    @property
    def title(self) -> str:
        """What it is, in words."""
        kind = self.config.get("model_type")
        if self.layout is None:
            return f"{kind}, {self.config.get('dtype')}"
        activations = "4-bit" if self.calibrated else "BF16"
        return f"{kind}, NVFP4 weights in the {self.layout.name} layout, {activations} activations"


class FolderCheck:
    """Compares a folder with the checkpoint that it was made from.

    trained: by which plan, of a folder in NVFP4. tokenizer: the run's; None does not look at the folder's.
    """

    def __init__(
        self, folder: Folder, checkpoint: Checkpoint, trained: TrainedPlan | None, tokenizer: TextTokenizer | None
    ) -> None:
        self.folder, self.checkpoint, self.trained, self.tokenizer = folder, checkpoint, trained, tokenizer
        self.sections = sections_of(checkpoint.config.model)
        self.rows = {} if trained is None else {f"{name}.weight": row for name, row in trained.fp4().items()}

    def findings(self) -> Iterator[Finding]:
        """One kind of thing after the other. Raises DamagedCheckpointError and ValueError for what cannot be read."""
        yield self._configuration()
        yield self._presence()
        yield self._plain_tensors()
        if self.trained is not None:
            yield self._codes(self.trained)
            yield self._shared_scales()
            yield self._exclusions()
        if self.tokenizer is not None:
            yield self._tokenizer(self.tokenizer)

    def _configuration(self) -> Finding:
        """Every key that an export writes of the model."""
        model, config = self.checkpoint.config.model, self.folder.config
        try:
            read = from_hf(config)
        except (ValueError, KeyError, TypeError) as error:
            return Finding(CONFIG, "", [f"it is not a configuration of such a model: {error}"])
        have = asdict(model)
        problems = [f"{k} is {v!r} there and {have[k]!r} in the checkpoint" for k, v in read.items() if have[k] != v]
        expected = to_hf(model)
        for key, value in expected.items():
            if key not in config or config[key] != value:
                problems.append(f"{key} is {config.get(key)!r} and should be {value!r}")
        return Finding(CONFIG, f"{len(expected)} keys", problems)

    def _presence(self) -> Finding:
        """Every tensor is there, and none that belongs to nothing."""
        expected, layout = set(), self.folder.layout
        for name, parts in self.sections.items():
            for part in parts:
                if name not in self.rows:
                    expected.add(part.name)
                    continue
                assert layout is not None
                kinds = [layout.codes, layout.scales, layout.weight_scale]
                kinds += [layout.input_scale] if self.folder.calibrated else []
                expected |= {f"{part.module}.{kind}" for kind in kinds}
        missing, surplus = sorted(expected - self.folder.names), sorted(self.folder.names - expected)
        problems = [f"{name} is missing" for name in missing] + [f"{name} belongs to nothing" for name in surplus]
        return Finding("tensors, by name", f"{len(expected)}", problems)

    def _plain_tensors(self) -> Finding:
        problems, count = list[str](), 0
        for name, parts in self.sections.items():
            if name not in self.rows:
                ours = self.checkpoint.tensor(name)
                count += len(parts)
                for part in parts:
                    if part.name in self.folder.names:
                        problems += self._plain(part, ours)
        return Finding("tensors in plain types", f"{count}", problems)

    def _plain(self, part: Section, ours: Tensor) -> list[str]:
        found = self.folder.shards.tensor(part.name)
        declared = "float32" if part.fp32 else self.folder.config.get("dtype")
        if str(found.dtype) != f"torch.{declared}":
            return [f"{part.name} is {found.dtype} and should be {declared}"]
        return _differences(part.name, found, part.published(ours).to(found.dtype).reshape(part.shape), bits=True)

    def _codes(self, trained: TrainedPlan) -> Finding:
        layout, problems, modules = self.folder.layout, list[str](), 0
        assert layout is not None
        for name, row in self.rows.items():
            master = self.checkpoint.tensor(name)
            values, scale = multiplied_weight(master, row, trained.compute_dtype)
            if layout.name == "compressed-tensors":  # the rounded inverse of what the GEMM applies
                amax = master.to(trained.compute_dtype).abs().amax().to(torch.float32)
                largest = 6.0 * (256.0 if row.recipe.fprop.right.four_over_six else 448.0)
                scale = torch.tensor([largest]) / amax if amax > 0 else torch.ones(1)
            for part in self.sections[name]:
                modules += 1
                stored = [f"{part.module}.{kind}" for kind in (layout.codes, layout.scales, layout.weight_scale)]
                if not self.folder.names.issuperset(stored):
                    continue  # reported with the names
                codes, block, tensor = map(self.folder.shards.tensor, stored)
                try:
                    found = decoded(codes, block)
                except ValueError as error:
                    problems.append(f"{part.module}: {error}")
                    continue
                problems += _differences(f"{part.module}, decoded", found, part.published(values))
                problems += _differences(stored[-1], tensor, scale)
        return Finding("NVFP4 weights, decoded", f"{len(self.rows)} linears, {modules} modules", problems)

    def _shared_scales(self) -> Finding:
        """Modules that engines fuse have one tensor scale, of weights and of inputs; and scales are numbers above 0."""
        layout, problems, fused = self.folder.layout, list[str](), 0
        assert layout is not None
        for name in self.rows:
            modules = [part.module for part in self.sections[name]]
            fused += len(modules) > 1
            for kind in (layout.weight_scale, layout.input_scale):
                names = [f"{module}.{kind}" for module in modules if f"{module}.{kind}" in self.folder.names]
                found = [self.folder.shards.tensor(each) for each in names]
                if any(not torch.equal(each, found[0]) for each in found):
                    problems.append(f"{', '.join(names)} differ, and engines take the largest for all of them")
                if any(each.dtype != torch.float32 or not (each.isfinite() & (each > 0)).all() for each in found):
                    problems.append(f"{names[0]} is {found[0].tolist()}, no scale")
        return Finding("scales of fused modules", f"{fused} of q, k and v", problems)

    def _exclusions(self) -> Finding:
        """A module is excluded if and only if it has no codes: by its name in files, and by that in programs."""
        layout, quantization, problems = self.folder.layout, self.folder.config["quantization_config"], list[str]()
        assert layout is not None
        quantized = [part.module for name in self.rows for part in self.sections[name]]
        plain = excluded_modules(self.sections, self.rows)
        for module, expected in [*((m, False) for m in quantized), *((m, True) for m in plain)]:
            names = {module}
            if layout.name == "compressed-tensors":  # read by transformers under its own names
                names.add(module.replace("backbone.", "model."))
            for name in sorted(names):
                if layout.excludes(quantization, name) != expected:
                    what = "not excluded, though it is in BF16" if expected else "excluded, though it has codes"
                    problems.append(f"{name} is {what}")
        for key, value in layout.quantization_config((), self.folder.calibrated).items():
            if key not in ("ignore", "producer") and quantization.get(key) != value:
                problems.append(f"quantization_config.{key} is {quantization.get(key)!r} and should be {value!r}")
        for name, content in layout.extra_files(plain, self.folder.calibrated).items():
            try:
                said = json.loads((self.folder.path / name).read_text())["quantization"]
            except (OSError, ValueError, KeyError, TypeError):
                said = None
            if said != json.loads(content)["quantization"]:
                problems.append(f"{name} is missing or does not say what is quantized here")
        return Finding("what is quantized", f"{len(plain)} excluded, {len(quantized)} not", problems)

    def _tokenizer(self, tokenizer: TextTokenizer) -> Finding:
        path, problems = self.folder.path / "tokenizer.json", list[str]()
        if not path.is_file():
            return Finding("tokenizer", "", ["tokenizer.json is missing"])
        found = load_tokenizer(path, tokenizer.eod_token)
        probe = ["Tokens, 1234 of them:\n\tdef f(x): return  x**2  # naïve 你好"]
        if found.eod_id != tokenizer.eod_id:
            problems.append(f"{tokenizer.eod_token} is {found.eod_id} there and {tokenizer.eod_id} in the run")
        same_kind = found.kind == tokenizer.kind
        if list(found.encode_batch(probe)[0]) != list(tokenizer.encode_batch(probe)[0]) or (
            same_kind and found.fingerprint() != tokenizer.fingerprint()
        ):
            problems.append(f"tokenizer.json is not {tokenizer.name}, which made the data of the run")
        return Finding("tokenizer", f"{found.vocab_size} tokens", problems)


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
