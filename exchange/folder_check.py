"""Whether an exported folder is what a checkpoint trained: every tensor, bit for bit, and what the configuration says.

What is expected is asked of the linears themselves (`multiplied_weight`: the operand that their backend hands to
fprop's GEMM), and what is there is decoded by the format's definition (`nvfp4_reading.py`): neither goes the way that
the export went.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.tokenizer import TextTokenizer, load_tokenizer
from exchange.checkpoint import Checkpoint
from exchange.hf.architectures import architecture_in, architecture_of
from exchange.hf.export import CONFIG
from exchange.hf.importing import is_import
from exchange.hf.sections import Section
from exchange.hf.shards import Shards
from exchange.nvfp4 import TrainedPlan, multiplied_weight
from exchange.nvfp4_encoder import excluded_modules, module_of
from exchange.nvfp4_layouts import Layout, is_calibrated, layout_of
from exchange.nvfp4_reading import decoded
from megatron_fp4.quantization.elements import E2M1_MAX, E4M3_MAX
from megatron_fp4.quantization.nvfp4 import FOUR_OVER_SIX_SCALE_MAX


class Finding(NamedTuple):
    """what: was compared. extent: how much of it, in words. problem: the first difference, empty if there is none."""

    what: str
    extent: str
    problem: str = ""


class Folder:
    """An exported folder, opened. Raises ValueError, in one line, for one that cannot be read as such."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.config: dict[str, Any] = json.loads((path / CONFIG).read_text())
        except FileNotFoundError:
            raise ValueError(f"{path} has no {CONFIG}; give an exported folder") from None
        except ValueError as error:
            raise ValueError(f"{path / CONFIG} is not readable ({error}); export again") from error
        try:
            self.layout: Layout | None = layout_of(self.config)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path / CONFIG}: {error}") from error
        self.shards = Shards(path)
        self.names = frozenset(self.shards.names)

    @property
    def title(self) -> str:
        """What it is, in words."""
        kind = self.config.get("model_type")
        if self.layout is None:
            return f"{kind}, {self.config.get('dtype')}"
        activations = "4-bit" if is_calibrated(self.config["quantization_config"]) else "BF16"
        return f"{kind}, NVFP4 weights in the {self.layout.name} layout, {activations} activations"

    def quantized(self) -> set[str]:
        """The modules with block scales."""
        return {name.removesuffix(".weight_scale") for name in self.names if name.endswith(".weight_scale")}


def check_folder(
    folder: Folder, checkpoint: Checkpoint, trained: TrainedPlan | None, tokenizer: TextTokenizer | None
) -> Iterator[Finding]:
    """Compare, one kind of thing after the other.

    trained: by which plan, of a folder in NVFP4. tokenizer: the run's; None does not look at the folder's.
    Raises DamagedCheckpointError and ValueError for what cannot be read at all.
    """
    sections = architecture_of(checkpoint.config.model).sections(checkpoint.config.model)
    rows = {} if trained is None else trained.fp4()
    again = is_import(checkpoint) and folder.config == json.loads(checkpoint.file(CONFIG))
    yield _configuration(folder, checkpoint, exactly=not again)
    yield _presence(folder, sections, {f"{name}.weight" for name in rows})
    wrong: list[str] = []
    tensors = 0
    for name, parts in sections.items():
        if name.removesuffix(".weight") not in rows:
            ours = checkpoint.tensor(name)
            tensors += len(parts)
            dtypes = checkpoint.trainer["imported"]["dtypes"] if again else {}
            wrong += [problem for part in parts if (problem := _plain_fault(folder, part, ours, dtypes))]
    yield Finding("tensors in plain types", f"{tensors}", _first(wrong))
    if trained is not None:
        assert folder.layout is not None
        yield _codes(folder, folder.layout, checkpoint, trained, sections)
        yield _shared_scales(folder, folder.layout, sections, rows)
        yield _exclusions(folder, folder.layout, sections, rows)
    if tokenizer is not None:
        yield _tokenizer(folder, tokenizer)


def _configuration(folder: Folder, checkpoint: Checkpoint, exactly: bool) -> Finding:
    """exactly: every key as it is written here, not only what makes the same model."""
    model = checkpoint.config.model
    try:
        read = architecture_in(folder.config).from_hf(folder.config)
    except (ValueError, KeyError, TypeError) as error:
        return Finding(CONFIG, "", f"it is not a configuration of such a model: {error}")
    have = asdict(model)
    problems = [f"{k} is {v!r} there and {have[k]!r} in the checkpoint" for k, v in read.items() if have[k] != v]
    expected = architecture_of(model).to_hf(model) if exactly else {}
    missing = object()
    problems += [
        f"{key} is {folder.config.get(key)!r} and should be {value!r}"
        for key, value in expected.items()
        if folder.config.get(key, missing) != value
    ]
    return Finding(CONFIG, f"{len(expected) or len(read)} keys", _first(problems))


def _presence(folder: Folder, sections: Mapping[str, Sequence[Section]], coded: set[str]) -> Finding:
    """Every tensor is there, and none that belongs to nothing."""
    expected = set()
    for name, parts in sections.items():
        for part in parts:
            if name not in coded:
                expected.add(part.name)
                continue
            assert folder.layout is not None
            tensors = [folder.layout.codes, folder.layout.scales, folder.layout.weight_scale]
            if is_calibrated(folder.config["quantization_config"]):
                tensors.append(folder.layout.input_scale)
            expected |= {f"{module_of(part)}.{tensor}" for tensor in tensors}
    missing, surplus = sorted(expected - folder.names), sorted(folder.names - expected)
    problems = [f"{name} is missing" for name in missing] + [f"{name} belongs to nothing" for name in surplus]
    return Finding("tensors, by name", f"{len(expected)}", _first(problems))


def _plain_fault(folder: Folder, part: Section, ours: Tensor, dtypes: Mapping[str, str]) -> str:
    """What is wrong with a tensor that is written as numbers, or an empty string."""
    if part.name not in folder.names:
        return ""  # said already
    found = folder.shards.tensor(part.name)
    declared = dtypes.get(part.name) or ("float32" if part.fp32 else folder.config.get("dtype"))
    if str(found.dtype) != f"torch.{declared}":
        return f"{part.name} is {found.dtype} and should be {declared}"
    expected = part.published(ours).to(found.dtype).reshape(part.shape)
    if found.shape != expected.shape:
        return f"{part.name} is {list(found.shape)} and should be {list(expected.shape)}"
    return _difference(part.name, found, expected, bits=True)


def _codes(
    folder: Folder,
    layout: Layout,
    checkpoint: Checkpoint,
    trained: TrainedPlan,
    sections: Mapping[str, Sequence[Section]],
) -> Finding:
    problems, modules = [], 0
    for name, row in trained.fp4().items():
        master, parts = checkpoint.tensor(f"{name}.weight"), sections[f"{name}.weight"]
        values, scale = multiplied_weight(master, row, trained.compute_dtype)
        amax = master.to(trained.compute_dtype).abs().amax().to(torch.float32)
        largest = FOUR_OVER_SIX_SCALE_MAX if row.recipe.fprop.right.four_over_six else E4M3_MAX
        modules += len(parts)
        for part in parts:
            module = module_of(part)
            stored = [f"{module}.{tensor}" for tensor in (layout.codes, layout.scales, layout.weight_scale)]
            if not folder.names.issuperset(stored):
                continue  # said already
            codes, block, tensor = (folder.shards.tensor(each) for each in stored)
            try:
                found = decoded(codes, block)
            except ValueError as error:
                problems.append(f"{module}: {error}")
                continue
            expected = part.published(values)
            if found.shape != expected.shape:
                problems.append(f"{module} is {list(found.shape)} and should be {list(expected.shape)}")
            elif problem := _difference(f"{module}, decoded", found, expected):
                problems.append(problem)
            problems += _tensor_scale_fault(stored[-1], tensor, layout, scale, amax, largest)
    return Finding("NVFP4 weights, decoded", f"{len(trained.fp4())} linears, {modules} modules", _first(problems))


def _tensor_scale_fault(
    name: str, stored: Tensor, layout: Layout, applied: Tensor, amax: Tensor, largest: float
) -> list[str]:
    """applied: by the GEMM. amax: of the weight. largest: what the largest block scale is mapped to."""
    if layout.weight_scale == "weight_scale_2":
        expected = applied
    else:
        expected = torch.tensor([E2M1_MAX * largest]) / amax if amax > 0 else torch.ones(1)
    if stored.dtype != torch.float32 or stored.shape != expected.shape or not torch.equal(stored, expected):
        return [f"{name} is {stored.tolist()} ({stored.dtype}) and should be {expected.tolist()}"]
    return []


def _shared_scales(
    folder: Folder, layout: Layout, sections: Mapping[str, Sequence[Section]], rows: Mapping[str, Any]
) -> Finding:
    """Modules that engines fuse have one tensor scale, of weights and of inputs; and input scales are numbers."""
    problems, fused = [], 0
    for name in rows:
        modules = [module_of(part) for part in sections[f"{name}.weight"]]
        fused += len(modules) > 1
        for tensor in (layout.weight_scale, layout.input_scale):
            names = [f"{module}.{tensor}" for module in modules if f"{module}.{tensor}" in folder.names]
            found = [folder.shards.tensor(each) for each in names]
            if any(not torch.equal(each, found[0]) for each in found):
                problems.append(f"{', '.join(names)} differ, and engines take the largest for all of them")
            if any(each.dtype != torch.float32 or not (each.isfinite() & (each > 0)).all() for each in found):
                problems.append(f"{names[0]} is {found[0].tolist()}, no scale")
    return Finding("scales of fused modules", f"{fused} of q, k and v", _first(problems))


def _exclusions(
    folder: Folder, layout: Layout, sections: Mapping[str, Sequence[Section]], rows: Mapping[str, Any]
) -> Finding:
    """A module is excluded if and only if it has no codes: by its name in files, and by that in programs."""
    quantization, coded = folder.config["quantization_config"], [f"{name}.weight" for name in rows]
    quantized = [module_of(part) for name in coded for part in sections[name]]
    plain = excluded_modules(sections, coded)
    problems = []
    for module, expected in [*((m, False) for m in quantized), *((m, True) for m in plain)]:
        names = {module}
        if layout.weight_scale != "weight_scale_2":  # read by transformers under its own names
            names.add(module.replace("backbone.", "model."))
        for name in sorted(names):
            if layout.excludes(quantization, name) != expected:
                word = "not excluded, though it is in BF16" if expected else "excluded, though it has codes"
                problems.append(f"{name} is {word}")
    expected_keys = layout.quantization_config((), is_calibrated(quantization))
    problems += [
        f"quantization_config.{key} is {quantization.get(key)!r} and should be {value!r}"
        for key, value in expected_keys.items()
        if key not in ("ignore", "producer") and quantization.get(key) != value
    ]
    for name, content in layout.extra_files(plain, is_calibrated(quantization)).items():
        path = folder.path / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif _quantization(path) != json.loads(content)["quantization"]:
            problems.append(f"{name} does not say what is quantized here")
    return Finding("what is quantized", f"{len(plain)} excluded, {len(quantized)} not", _first(problems))


def _quantization(path: Path) -> Any:
    try:
        return json.loads(path.read_text())["quantization"]
    except (ValueError, KeyError, TypeError):
        return None


def _tokenizer(folder: Folder, tokenizer: TextTokenizer) -> Finding:
    what = "tokenizer"
    if not (folder.path / "tokenizer.json").is_file():
        return Finding(what, "", "tokenizer.json is missing")
    found = load_tokenizer(folder.path / "tokenizer.json", tokenizer.eod_token)
    probe = "Tokens, 1234 of them:\n\tdef f(x): return  x**2  # naïve 你好"
    if found.eod_id != tokenizer.eod_id:
        return Finding(what, "", f"{tokenizer.eod_token} is {found.eod_id} there and {tokenizer.eod_id} in the run")
    same_ids = list(found.encode_batch([probe])[0]) == list(tokenizer.encode_batch([probe])[0])
    if not same_ids or (found.kind == tokenizer.kind and found.fingerprint() != tokenizer.fingerprint()):
        return Finding(what, "", f"tokenizer.json is not {tokenizer.name}, which made the data of the run")
    return Finding(what, f"{found.vocab_size} tokens")


def _difference(name: str, found: Tensor, expected: Tensor, bits: bool = False) -> str:
    """The first element that differs, or an empty string. bits: also in the sign of a zero, which a code may have and
    no product sees."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    other = found.view(integers) != expected.view(integers) if bits else ~(found == expected)
    if not other.any():
        return ""
    at = tuple(other.nonzero()[0].tolist())
    values = f"{found[at].item():.9g} and should be {expected[at].item():.9g}"
    return f"{name}: {int(other.sum())} of {found.numel()} elements differ; {list(at)} is {values}"


def _first(problems: Sequence[str]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}" if problems else ""
