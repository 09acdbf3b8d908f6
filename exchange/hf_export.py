"""A checkpoint as a Hugging Face folder: config.json, safetensors, tokenizer, generation config, model card.

One parameter after another is read, whatever mesh wrote them, so memory holds a shard and a parameter. There is a whole
folder, or none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from megatron_fp4.logging.metrics import last_validation
from megatron_fp4.runtime.revision import revision
from models.pattern import parameter_count

CONFIG, GENERATION, CARD = "config.json", "generation_config.json", "README.md"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2 << 30
Progress = Callable[[int, int], None]
"""Is told how many of how many elements of weights are written."""


class PlainEncoder:
    """Turns our parameters into the tensors of a folder, one at a time: in `dtype`, but in FP32 where rounding is not
    allowed (A_log, D, dt_bias)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @property
    def description(self) -> str:
        """For the model card: what the weights are written as, in a sentence."""
        if self.dtype == torch.float32:
            return "The FP32 master weights."
        return f"The FP32 master weights, in {_name(self.dtype)}; A_log, D and dt_bias in float32."

    def tensors(self, name: str, sections: Sequence[Section], ours: Tensor) -> dict[str, Tensor]:
        """What our parameter `name` becomes, by published names. ours: the whole of it, FP32 on the CPU, our order of
        rows."""
        dtypes = (torch.float32 if section.fp32 else self.dtype for section in sections)
        return {s.name: s.published(ours).view(s.shape).to(d) for s, d in zip(sections, dtypes, strict=True)}

    def config_entries(self) -> dict[str, Any]:
        """More for config.json."""
        return {"dtype": _name(self.dtype)}

    def extra_files(self) -> dict[str, bytes]:
        """More files of the folder."""
        return {}


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

    def tensors(self, name: str, sections: Sequence[Section], ours: Tensor) -> dict[str, Tensor]:
        """Raises ValueError for NaN or inf."""
        if name not in self._rows:
            return super().tensors(name, sections, ours)
        made, found = trained_weight(ours, self._rows[name], self.trained.compute_dtype), dict[str, Tensor]()
        amax = None if self._input_amax is None else self._input_amax[name.removesuffix(".weight")]
        for section in sections:
            part = made if section.rows is None else reordered(made, section.rows)
            found |= self._layout.tensors(section.module, part, amax)
        return found

    def config_entries(self) -> dict[str, Any]:
        quantization = self._layout.quantization_config(self.excluded, self._input_amax is not None)
        return {**super().config_entries(), "quantization_config": quantization}

    def extra_files(self) -> dict[str, bytes]:
        return self._layout.extra_files(self.excluded, self._input_amax is not None)


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
    config = checkpoint.config.model
    sections = sections_of(config)
    check_tensors({name: shape_of(parts) for name, parts in sections.items()}, checkpoint)
    length = sequence_length(checkpoint)
    files = {} if tokenizer is None else tokenizer_files(tokenizer, length)
    special = _special_ids(checkpoint, tokenizer)
    described = {**to_hf(config), **special, "max_position_embeddings": length, **encoder.config_entries()}
    checkpoint.verify()  # last, because it reads all of a large checkpoint, moments included
    with new_folder(output, checkpoint.folder) as folder:
        _write_shards(folder, _encoded(checkpoint, encoder, sections, progress), shard_bytes)
        (folder / CONFIG).write_text(_json(described))
        generation = {key: value for key, value in special.items() if value is not None}
        if not described["use_cache"]:  # of config.json, `generate` does not take it
            generation["use_cache"] = False
        (folder / GENERATION).write_text(_json(generation))
        (folder / CARD).write_text(model_card(checkpoint, encoder))
        for name, content in {**files, **encoder.extra_files()}.items():
            (folder / name).write_bytes(content)


def _encoded(
    checkpoint: Checkpoint, encoder: PlainEncoder, sections: Sections, progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the folder by name, one parameter after the other."""
    written, total = 0, sum(shape.numel() for shape in checkpoint.tensors.values())
    for name, parts in sections.items():
        yield from encoder.tensors(name, parts, checkpoint.tensor(name)).items()
        written += checkpoint.tensors[name].numel()
        progress(written, total)


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Files of at most `shard_bytes` each, or one tensor, named as transformers does. Raises OSError."""
    shards: list[list[str]] = []
    content: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        if content and size + tensor.nbytes > shard_bytes:
            _write_shard(folder / f"{len(shards)}", content)
            shards.append(list(content))
            content, size = {}, 0
        content[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    _write_shard(folder / f"{len(shards)}", content)
    shards.append(list(content))
    if len(shards) == 1:
        (folder / "0").rename(folder / SINGLE)
        return
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for number, file in enumerate(files):
        (folder / f"{number}").rename(folder / file)
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    (folder / INDEX).write_text(_json({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _write_shard(path: Path, content: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(content, path, metadata={"format": "pt"})
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(f"{path.parent} cannot be written ({error}); make room, or name another folder") from error
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # it makes them for their owner alone


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
