"""A checkpoint as a Hugging Face folder: config.json, safetensors, tokenizer, generation config, model card.

One parameter after another is read, whatever mesh wrote them, so memory holds a shard and a parameter. There is a whole
folder, or none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import TextTokenizer
from exchange.architectures import Sections, architecture_of, sections_of, shape_of, to_hf
from exchange.checkpoint import Checkpoint, check_tensors
from exchange.nvfp4 import (
    MODELOPT,
    Layout,
    TrainedPlan,
    hf_quant_config,
    quantization_config,
    reordered,
    trained_weight,
)
from exchange.tokenizer import tokenizer_files
from exchange.weights_only import new_folder
from megatron_fp4 import __version__
from megatron_fp4.logging.metrics import last_validation
from megatron_fp4.precision.plan import PlannedLinear
from megatron_fp4.runtime.revision import revision
from models.pattern import parameter_count

CONFIG, GENERATION, CARD, QUANTIZATION = "config.json", "generation_config.json", "README.md", "hf_quant_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHARD_BYTES = 2 << 30
Progress = Callable[[int, int], None]
"""Is told how many of how many elements of weights are written."""


@dataclass(frozen=True)
class NVFP4Weights:
    """How the linears that were trained in NVFP4 are written.

    input_amax: linear -> FP32 0-dim, the largest magnitude of its input, of every linear in `trained.fp4()`; None
    leaves activations in BF16.
    """

    layout: Layout
    trained: TrainedPlan
    input_amax: Mapping[str, Tensor] | None = None

    def rows(self) -> dict[str, PlannedLinear]:
        """By the names of parameters."""
        return {f"{name}.weight": row for name, row in self.trained.fp4().items()}

    def config(self, sections: Sections) -> dict[str, Any]:
        """config.json's `quantization_config`."""
        excluded = excluded_modules(sections, self.rows())
        return quantization_config(self.layout, excluded, self.input_amax is not None)


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
    dtype: torch.dtype = torch.bfloat16,
    nvfp4: NVFP4Weights | None = None,
    tokenizer: TextTokenizer | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write `output`, which must not exist.

    dtype: of all weights that are not NVFP4 codes; A_log, D and dt_bias stay FP32. tokenizer: of the run, None to leave
    it out.
    Raises ValueError for a model that no architecture of transformers computes, a tokenizer that cannot be written, NaN
    or inf in a weight to be quantized, or an output that exists or lies inside the checkpoint; DamagedCheckpointError
    for a checkpoint that is not whole; and OSError. Then nothing is left.
    """
    config = checkpoint.config.model
    sections = sections_of(config)
    check_tensors({name: shape_of(parts) for name, parts in sections.items()}, checkpoint)
    length = sequence_length(checkpoint)
    content = {} if tokenizer is None else tokenizer_files(tokenizer, length)
    special = _special_ids(checkpoint, tokenizer)
    described = {**to_hf(config), **special, "max_position_embeddings": length, "dtype": _name(dtype)}
    generation = {key: value for key, value in special.items() if value is not None}
    if not described["use_cache"]:  # of config.json, `generate` does not take it
        generation["use_cache"] = False
    if nvfp4 is not None:
        described["quantization_config"] = nvfp4.config(sections)
        if nvfp4.layout is MODELOPT:
            content[QUANTIZATION] = _json(hf_quant_config(described["quantization_config"])).encode()
    content |= {CONFIG: _json(described).encode(), GENERATION: _json(generation).encode()}
    content[CARD] = model_card(checkpoint, dtype, nvfp4).encode()
    checkpoint.verify()  # last, because it reads all of a large checkpoint, moments included
    with new_folder(output, checkpoint.folder) as folder:
        _write_shards(folder, _encoded(checkpoint, sections, dtype, nvfp4, progress))
        for name, text in content.items():
            (folder / name).write_bytes(text)


def _encoded(
    checkpoint: Checkpoint, sections: Sections, dtype: torch.dtype, nvfp4: NVFP4Weights | None, progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the folder by name, one parameter after the other."""
    written, total = 0, sum(shape.numel() for shape in checkpoint.tensors.values())
    rows = {} if nvfp4 is None else nvfp4.rows()
    for name, parts in sections.items():
        ours = checkpoint.tensor(name)
        if nvfp4 is not None and name in rows:
            made = trained_weight(ours, rows[name], nvfp4.trained.compute_dtype)
            amax = None if nvfp4.input_amax is None else nvfp4.input_amax[name.removesuffix(".weight")]
            for part in parts:
                codes = made if part.rows is None else reordered(made, part.rows)
                yield from nvfp4.layout.tensors(part.module, codes, amax).items()
        else:
            for part in parts:
                values = part.published(ours)
                yield part.name, values if part.fp32 else values.to(dtype)
        progress(written := written + ours.numel(), total)


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Files of at most SHARD_BYTES each, or one tensor, named as transformers does. Raises OSError."""
    shards: list[list[str]] = []
    content: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        _write_shard(folder / f"{len(shards)}", content)
        shards.append(list(content))
        content.clear()

    for name, tensor in tensors:
        if content and sum(each.nbytes for each in content.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        content[name], total = tensor, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "0").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
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


def model_card(checkpoint: Checkpoint, dtype: torch.dtype, nvfp4: NVFP4Weights | None) -> str:
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
        f"| weights in this folder | {_weights(dtype, nvfp4)} |",
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
    lines.append("\n## Use\n")
    if nvfp4 is not None:
        lines.append("```\nvllm serve .\n```")
        if nvfp4.layout is not MODELOPT:
            lines.append("or, decompressed to BF16 (with compressed-tensors installed):\n")
    if nvfp4 is None or nvfp4.layout is not MODELOPT:
        lines.append(_IN_TRANSFORMERS)
    return "\n".join(lines) + "\n"


def _weights(dtype: torch.dtype, nvfp4: NVFP4Weights | None) -> str:
    """What the weights are written as, for the model card."""
    if nvfp4 is None:
        rounded = "" if dtype == torch.float32 else f", in {_name(dtype)}; A_log, D and dt_bias in float32"
        return f"The FP32 master weights{rounded}."
    trained, made = nvfp4.trained, "that training multiplied with"
    if trained.before_switch:
        made = "of the master weights, by the plan before the run's precision switch"
    text = (
        f"{len(trained.fp4())} of {len(trained.plan.rows)} linears as the NVFP4 codes and scales {made} "
        f"({nvfp4.layout.name} layout); everything else in bfloat16, A_log, D and dt_bias in float32."
    )
    if others := trained.others():
        text += f" Linears trained in {', '.join(sorted(set(others.values())))} are in bfloat16: {len(others)}."
    return text if nvfp4.input_amax is None else f"{text} Input scales are from calibration on held-out text."


def _losses(checkpoint: Checkpoint) -> list[str]:
    """The last validation up to the checkpoint, if the run's records lie beside it."""
    last = None
    if not checkpoint.weights_only:
        last = last_validation(checkpoint.folder.absolute().parent.parent, checkpoint.step)
    if last is None:
        return []

    def shown(value: float | None) -> str:
        """None: it was not finite, for which JSON has no number."""
        return "not finite" if value is None else f"{value:.4f}"

    bits = {name: shown(value) for name, value in (last.get("bits_per_byte") or {}).items()}
    return [
        "\n## Held-out loss\n",
        f"Step {last['step']:,}, in the precision of training.\n",
        "| set | nats per token | bits per byte |\n|---|---|---|",
        *(f"| {name} | {shown(loss)} | {bits.get(name, '')} |" for name, loss in last["losses"].items()),
    ]
