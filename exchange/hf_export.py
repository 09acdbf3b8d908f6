"""A checkpoint as a Hugging Face folder: config.json, safetensors, tokenizer, generation config, model card.

One parameter after another is read, whatever mesh wrote them, so memory holds a shard and a parameter. The folder is
written under another name and renamed: there is a whole one, or none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import TextTokenizer
from exchange.architectures import Section, Sections, architecture_of, sections_of, shape_of, to_hf
from exchange.checkpoint import Checkpoint, check_tensors
from exchange.nvfp4 import Layout, TrainedPlan, reordered, trained_weight
from exchange.tokenizer import tokenizer_files
from exchange.weights_only import new_folder
from megatron_fp4 import __version__
from megatron_fp4.checkpoint.files import TRAINER
from megatron_fp4.logging.metrics import last_validation
from megatron_fp4.quantization.tensor import NVFP4Tensor
from megatron_fp4.runtime.revision import revision
from models.pattern import parameter_count

CONFIG, GENERATION, CARD = "config.json", "generation_config.json", "README.md"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2 << 30
HUGGING_FACE = "hugging_face"
"""`format` of an imported checkpoint that was such a folder."""
Progress = Callable[[int, int], None]
"""Is told the bytes of weights written, and all of them."""


class PlainEncoder:
    """Turns our parameters into the tensors of a folder, one at a time: in `dtype`, but in FP32 where rounding is not
    allowed (A_log, D, dt_bias).

    dtypes: published name -> another dtype, as an imported folder had it.
    """

    def __init__(self, dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        self.dtype, self._dtypes = dtype, dict(dtypes or {})

    @property
    def description(self) -> str:
        """For the model card: what the weights are written as, in a sentence."""
        if self.dtype == torch.float32:
            return "The FP32 master weights."
        return f"The FP32 master weights, in {_name(self.dtype)}; A_log, D and dt_bias in float32."

    def stored(self, name: str, sections: Sequence[Section]) -> dict[str, Tensor]:
        """What our parameter `name` becomes, before it is read: tensors without data."""
        return {s.name: torch.empty(s.shape, dtype=self._dtype(s), device="meta") for s in sections}

    def tensors(self, name: str, sections: Sequence[Section], ours: Tensor) -> dict[str, Tensor]:
        """The tensors of `stored` from the whole parameter: FP32 on the CPU, our order of rows.

        Raises ValueError where a finite number would become infinite.
        """
        found = {}
        for section in sections:
            values = section.published(ours).view(section.shape)
            written = values.to(self._dtype(section))
            if written.dtype == torch.float16 and not torch.equal(written.isinf(), values.isinf()):
                largest = float(values.abs().max())
                raise ValueError(f"{section.name} has values up to {largest:.4g}, beyond float16; choose another dtype")
            found[section.name] = written
        return found

    def config_entries(self) -> dict[str, Any]:
        """More for config.json."""
        return {"dtype": _name(self.dtype)}

    def extra_files(self) -> dict[str, bytes]:
        """More files of the folder."""
        return {}

    def _dtype(self, section: Section) -> torch.dtype:
        return self._dtypes.get(section.name, torch.float32 if section.fp32 else self.dtype)


class NVFP4Encoder(PlainEncoder):
    """Codes and scales for the linears that were trained in NVFP4, BF16 for everything else.

    layout: whose names and configuration. trained: the plan, as `choose_plan` gives it. sections: of all parameters of
    the model. input_amax: linear -> FP32 0-dim, the largest magnitude of its input, of every linear in `trained.fp4()`;
    None leaves activations in BF16.
    """

    def __init__(
        self,
        layout: Layout,
        trained: TrainedPlan,
        sections: Sections,
        input_amax: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(torch.bfloat16)
        self._layout, self.trained, self._input_amax = layout, trained, input_amax
        self._rows = {f"{name}.weight": row for name, row in trained.fp4().items()}
        self.quantized = [section.module for name in self._rows for section in sections[name]]
        """The modules with codes, by their published names."""
        self.excluded = excluded_modules(sections, self._rows)

    @property
    def description(self) -> str:
        made = "that training multiplied with"
        if self.trained.before_switch:
            made = "of the master weights, by the plan before the run's precision switch"
        text = (
            f"{len(self._rows)} of {len(self.trained.plan.rows)} linears as the NVFP4 codes and scales {made} "
            f"({self._layout.name} layout); everything else in bfloat16, A_log, D and dt_bias in float32."
        )
        if others := self.trained.others():
            text += f" Linears trained in {', '.join(sorted(set(others.values())))} are in bfloat16: {len(others)}."
        if self._input_amax is not None:
            text += " Input scales are from calibration on held-out text."
        return text

    def stored(self, name: str, sections: Sequence[Section]) -> dict[str, Tensor]:
        if name not in self._rows:
            return super().stored(name, sections)
        found: dict[str, Tensor] = {}
        for section in sections:
            rows, columns = section.shape
            codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
            scales = torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn, device="meta")
            empty = NVFP4Tensor(codes, scales, (1, 16), torch.ones(()))
            found |= self._layout.tensors(section.module, empty, self._amax(name))
        return found

    def tensors(self, name: str, sections: Sequence[Section], ours: Tensor) -> dict[str, Tensor]:
        """Raises ValueError for NaN or inf."""
        if name not in self._rows:
            return super().tensors(name, sections, ours)
        made, found = trained_weight(ours, self._rows[name], self.trained.compute_dtype), dict[str, Tensor]()
        for section in sections:
            part = made if section.rows is None else reordered(made, section.rows)
            found |= self._layout.tensors(section.module, part, self._amax(name))
        return found

    def config_entries(self) -> dict[str, Any]:
        quantization = self._layout.quantization_config(self.excluded, self._input_amax is not None)
        return {**super().config_entries(), "quantization_config": quantization}

    def extra_files(self) -> dict[str, bytes]:
        return self._layout.extra_files(self.excluded, self._input_amax is not None)

    def _amax(self, name: str) -> Tensor | None:
        return None if self._input_amax is None else self._input_amax[name.removesuffix(".weight")]


def excluded_modules(sections: Sections, quantized: Collection[str]) -> list[str]:
    """The modules with weights of more than one dimension that are not in `quantized` (by our names), which engines
    could otherwise take for quantized ones: linears in BF16, the head, and convolutions, which some engines compute by
    a class for linears. Not the embedding."""
    return [
        section.module
        for name, parts in sections.items()
        for section in parts
        if name not in quantized and name != "embedding.weight" and len(section.shape) > 1
    ]


def export_hf(
    checkpoint: Checkpoint,
    output: Path,
    *,
    encoder: PlainEncoder,
    tokenizer: TextTokenizer | None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write `output`, which must not exist. tokenizer: of the run, None to leave it out.

    Raises ValueError for a model that no architecture of transformers computes, a tokenizer that cannot be written, or
    an output that exists or lies inside the checkpoint; DamagedCheckpointError for a checkpoint that is not whole; and
    OSError. Then nothing is left.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    config = checkpoint.config.model
    sections = sections_of(config)
    check_tensors({name: shape_of(parts) for name, parts in sections.items()}, checkpoint.tensors, checkpoint.name)
    length = sequence_length(checkpoint)
    files = {} if tokenizer is None else tokenizer_files(tokenizer, length)
    stored = {key: value for name, parts in sections.items() for key, value in encoder.stored(name, parts).items()}
    split = split_torch_state_dict_into_shards(
        stored, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes
    )
    special = _special_ids(checkpoint, tokenizer)
    described = {**to_hf(config), **special, "max_position_embeddings": length, **encoder.config_entries()}
    checkpoint.verify()  # last, because it reads all of a large checkpoint, moments included
    with new_folder(output, checkpoint.folder) as folder:
        _write_shards(folder, checkpoint, encoder, sections, split.filename_to_tensors, progress)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (folder / INDEX).write_text(_json(index))
        (folder / CONFIG).write_text(_json(described))
        generation = {key: value for key, value in special.items() if value is not None}
        if not described["use_cache"]:  # of config.json, `generate` does not take it
            generation["use_cache"] = False
        (folder / GENERATION).write_text(_json(generation))
        (folder / CARD).write_text(model_card(checkpoint, encoder))
        for name, content in {**files, **encoder.extra_files()}.items():
            (folder / name).write_bytes(content)


def export_again(checkpoint: Checkpoint, output: Path, *, progress: Progress = lambda done, total: None) -> None:
    """Write the folder that a checkpoint was imported from once more: its files byte for byte, its tensors in the types
    and shards that they had. Raises as `export_hf` does."""
    imported, sections = checkpoint.trainer["imported"], sections_of(checkpoint.config.model)
    encoder = PlainEncoder(torch.float32, {n: getattr(torch, dtype) for n, dtype in imported["dtypes"].items()})
    shards = imported["shards"]
    names = sorted(part.name for parts in sections.values() for part in parts)
    if sorted(n for group in shards.values() for n in group) != names or any(Path(n).name != n for n in shards):
        raise ValueError(
            f"{checkpoint.folder}: {TRAINER} does not describe the folder it was imported from; add --dtype"
        )
    with new_folder(output, checkpoint.folder) as folder:
        _write_shards(folder, checkpoint, encoder, sections, shards, progress)
        for name in imported["files"]:
            (folder / name).write_bytes(checkpoint.file(name))


def is_hf_import(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint was such a folder, and can become it again."""
    return checkpoint.trainer.get("imported", {}).get("format") == HUGGING_FACE


def _write_shards(
    folder: Path,
    checkpoint: Checkpoint,
    encoder: PlainEncoder,
    sections: Sections,
    shards: Mapping[str, Sequence[str]],
    progress: Progress,
) -> None:
    """shards: file -> the tensors in it. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    stored = {name: encoder.stored(name, parts) for name, parts in sections.items()}
    owner = {key: name for name, tensors in stored.items() for key in tensors}
    written, total = 0, sum(tensor.nbytes for tensors in stored.values() for tensor in tensors.values())
    mask = os.umask(0)
    os.umask(mask)
    made: dict[str, Tensor] = {}
    for file, names in shards.items():
        content: dict[str, Tensor] = {}
        for key in names:
            if key not in made:
                made = encoder.tensors(owner[key], sections[owner[key]], checkpoint.tensor(owner[key]))
            content[key] = made.pop(key)
        try:
            save_file(content, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(f"{folder / file} cannot be written ({error}); make room, or name another folder") from error
        (folder / file).chmod(0o666 & ~mask)  # it makes them for their owner alone
        written += sum(tensor.nbytes for tensor in content.values())
        progress(written, total)


def sequence_length(checkpoint: Checkpoint) -> int:
    """The longest sequences of the run, or what imported weights came with, in tokens."""
    if checkpoint.weights_only and (came_with := checkpoint.trainer["imported"].get("sequence_length")):
        return int(came_with)
    train, phases = checkpoint.config.train, checkpoint.config.data.phases
    return max([train.sequence_length, *(phase.sequence_length or 0 for phase in phases)])


def _special_ids(checkpoint: Checkpoint, tokenizer: TextTokenizer | None) -> dict[str, Any]:
    """Written also where they are none: transformers would take ids of its own."""
    if tokenizer is None:
        came_with = checkpoint.trainer.get("imported", {}).get("special_ids", {})
        return {key: came_with.get(key) for key in SPECIAL_IDS}
    bos = None if tokenizer.bos_token is None else tokenizer.token_id(tokenizer.bos_token)
    return dict(zip(SPECIAL_IDS, (bos, tokenizer.eod_id, tokenizer.eod_id), strict=True))


SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _json(content: Mapping[str, Any]) -> str:
    """As transformers writes it."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_IN_TRANSFORMERS = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
print(tokenizer.decode(model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=32)[0]))
```"""


def model_card(checkpoint: Checkpoint, encoder: PlainEncoder) -> str:
    """The README.md: what the model is, how it was trained, in which precision, what it scored."""
    config, trainer, model = checkpoint.config, checkpoint.trainer, checkpoint.config.model
    code = f"megatron_fp4 {trainer['version']} ({trainer.get('commit', 'commit unknown')})"
    if checkpoint.weights_only:
        source = trainer["imported"].get("from", "elsewhere")
        origin, made = f"imported by {code} from {source}.", "made for"
    else:
        begun = trainer.get("initialized_from")
        weights = f", from the weights of {Path(begun['path']).name}" if begun else ""
        steps = f"{checkpoint.step:,} steps of {config.train.steps:,}{weights}"
        origin, made = f"trained by {code} on {checkpoint.tokens:,} tokens in {steps}.", "trained on"
    lines = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- megatron_fp4",
        f"- {architecture_of(model)}\n---\n",
        f"# {model.name}\n",
        f"A base language model of {parameter_count(model).total:,} parameters, {origin}\n",
        "| | |\n|---|---|",
        f"| blocks (`M` Mamba-2, `-` FFN, `*` attention) | `{model.pattern}` |",
        f"| hidden, FFN | {model.hidden_dim}, {model.ffn_dim} |",
        f"| vocabulary | {model.vocab_size:,} |",
        f"| sequences it was {made} | {sequence_length(checkpoint):,} tokens |",
        f"| weights in this folder | {encoder.description} |",
        f"| exported by | megatron_fp4 {__version__} ({revision()}) |",
        "\n## Precision in training\n",
    ]
    if "plan" in trainer:
        plan, switch = trainer["plan"], config.precision.switch
        lines.append(f"Trained with `precision={config.precision.name}`; masters and optimizer in FP32.")
        if (at := trainer["switch"]["switched_at"]) is not None:
            lines.append(f"Precision switched to `{switch.target}` ({switch.scope}) before step {at + 1}.")
        lines.append(f"Quantized linears when this checkpoint was made: {plan['quantized_linears']}.")
        lines.append("\n| recipe | linears | operands |\n|---|---|---|")
        for recipe, operands in plan["recipes"].items():
            count = sum(linear["recipe"] == recipe for linear in plan["linears"].values())
            cells = "<br>".join(operands).replace("|", "\\|")
            lines.append(f"| {recipe} | {count} | {cells} |")
    else:
        lines.append("These are imported weights, which no run of this framework has trained.")
    lines += _losses(checkpoint)
    method = encoder.config_entries().get("quantization_config", {}).get("quant_method")
    lines.append("\n## Use\n")
    if method is not None:
        lines.append("```\nvllm serve .\n```")
    if method == "compressed-tensors":
        lines.append("or, decompressed to BF16 (with compressed-tensors installed):\n")
    if method != "modelopt":
        lines.append(_IN_TRANSFORMERS)
    return "\n".join(lines) + "\n"


def _losses(checkpoint: Checkpoint) -> list[str]:
    """The last validation up to the checkpoint, if the run's records lie beside it."""
    last = None
    if not checkpoint.weights_only:
        last = last_validation(checkpoint.folder.absolute().parent.parent, checkpoint.step)
    if last is None:
        return []
    bits = last.get("bits_per_byte") or {}

    def shown(value: float | str | None) -> str:
        """None: it was not finite, for which JSON has no number."""
        return "not finite" if value is None else value if isinstance(value, str) else f"{value:.4f}"

    rows = [f"| {name} | {shown(loss)} | {shown(bits.get(name, ''))} |" for name, loss in last["losses"].items()]
    return [
        "\n## Held-out loss\n",
        f"Step {last['step']:,}, in the precision of training.\n",
        "| set | nats per token | bits per byte |\n|---|---|---|",
        *rows,
    ]
