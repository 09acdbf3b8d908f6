"""Exports a checkpoint as a Hugging Face folder: config.json, safetensors, tokenizer, generation config, model card.

Parameters are read one by one, for any mesh that wrote them, so memory holds one output file and one parameter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.tokenizer import TextTokenizer
from exchange import nvfp4 as nvfp4_weights
from exchange.architectures import architecture_of, sections_of, to_hf
from exchange.checkpoint import Checkpoint, check_tensors
from exchange.tokenizer import check_exported_tokenizer, exported_tokenizer
from exchange.weights_only import new_folder
from megatron_fp4 import __version__
from megatron_fp4.checkpoint.files import TRAINER, well_formed
from megatron_fp4.logging.console import tracked
from megatron_fp4.logging.metrics import last_validation
from megatron_fp4.runtime.revision import revision
from models.pattern import MIXERS, parameter_count
from models.published import Sections, shape_of

CONFIG, GENERATION, CARD, QUANTIZATION = "config.json", "generation_config.json", "README.md", "hf_quant_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHARD_BYTES = 2 << 30


class NVFP4Weights(NamedTuple):
    """NVFP4 weights. trained: their plan. largest_inputs: of each linear, FP32 0-dim; None: BF16 activations."""

    layout: nvfp4_weights.Layout
    trained: nvfp4_weights.TrainedPlan
    largest_inputs: Mapping[str, Tensor] | None


def export_hf(
    checkpoint: Checkpoint,
    output: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    nvfp4: NVFP4Weights | None = None,
    tokenizer: TextTokenizer | None = None,
) -> None:
    """Write `output`, which must not exist.

    dtype: of all weights without NVFP4 codes; A_log, D and dt_bias stay FP32. nvfp4: None for no NVFP4 codes.
    tokenizer: the run's; None to leave it out. transformers' AutoTokenizer of the folder must give its ids.
    Raises ValueError for a model without an architecture in transformers, a tokenizer that cannot be written, NaN or
    inf in a weight to be quantized, or an output that exists or is inside the checkpoint; DamagedCheckpointError;
    OSError. After an error nothing is left of the output.
    """
    config = checkpoint.config.model
    sections = sections_of(config)
    expected = {name: shape_of(parts) for name, parts in sections.items()}
    check_tensors(checkpoint.tensors, expected, checkpoint.folder)
    length = sequence_length(checkpoint)
    content = exported_tokenizer(checkpoint, tokenizer, length)
    special = _special_ids(checkpoint, tokenizer)
    described = {**to_hf(config), **special, "max_position_embeddings": length, "dtype": _name(dtype)}
    generation = {key: value for key, value in special.items() if value is not None}
    if not described["use_cache"]:  # `generate` reads it from here, not from config.json
        generation["use_cache"] = False
    if nvfp4 is not None:
        excluded = nvfp4_weights.excluded_modules(sections, nvfp4.trained.nvfp4_linears())
        calibrated = nvfp4.largest_inputs is not None
        described["quantization_config"] = nvfp4_weights.quantization_config(nvfp4.layout, excluded, calibrated)
        if nvfp4.layout is nvfp4_weights.MODELOPT:
            content[QUANTIZATION] = _json(nvfp4_weights.hf_quant_config(described["quantization_config"])).encode()
    content |= {CONFIG: _json(described).encode(), GENERATION: _json(generation).encode()}
    with well_formed(checkpoint.folder / TRAINER):
        content[CARD] = model_card(checkpoint, dtype, nvfp4).encode()
    checkpoint.verify()  # after the other checks, because it reads every file, moments included
    with new_folder(output, checkpoint.folder) as folder:
        for name, text in content.items():
            (folder / name).write_bytes(text)
        check_exported_tokenizer(folder, checkpoint, tokenizer)
        _write_shards(folder, _encoded(checkpoint, sections, dtype, nvfp4))


def _encoded(
    checkpoint: Checkpoint, sections: Sections, dtype: torch.dtype, nvfp4: NVFP4Weights | None
) -> Iterator[tuple[str, Tensor]]:
    rows = {} if nvfp4 is None else nvfp4.trained.nvfp4_linears()
    for name, parts in tracked(sections.items(), "parameters written"):
        ours, row = checkpoint.tensor(name), rows.get(name.removesuffix(".weight"))
        if nvfp4 is not None and row is not None:
            inputs = nvfp4.largest_inputs
            largest = None if inputs is None else inputs[row.linear.name]
            for part in parts:
                if part is parts[0] or part.expert is not None:
                    made = nvfp4_weights.trained_weight(part.matrix(ours), row, nvfp4.trained.compute_dtype)
                codes = made if part.rows is None else nvfp4_weights.reordered(made, part.rows)
                yield from nvfp4.layout.tensors(part.module, codes, largest).items()
        else:
            for part in parts:
                values = part.published(ours)
                yield part.name, values if part.fp32 else values.to(dtype)


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write files of at most SHARD_BYTES each (a single tensor may be larger), with transformers' names."""
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
    except SafetensorError as error:  # for example of a full disk
        raise OSError(f"{path.parent} cannot be written ({error}); make room, or name another folder") from error
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # save_file creates files that only their owner can read


def sequence_length(checkpoint: Checkpoint) -> int:
    """The longest sequence length of the run, or of imported weights the one that was imported with them, in tokens."""
    if checkpoint.weights_only and (came_with := checkpoint.trainer["imported"].get("sequence_length")):
        return int(came_with)
    train, phases = checkpoint.config.train, checkpoint.config.data.phases
    return max([train.sequence_length, *(phase.sequence_length or 0 for phase in phases)])


def _special_ids(checkpoint: Checkpoint, tokenizer: TextTokenizer | None) -> dict[str, Any]:
    """The ids of special tokens. They are written even if they are None; otherwise transformers uses defaults."""
    came_with = checkpoint.trainer.get("imported", {}).get("special_ids", {})
    if tokenizer is None or came_with:
        return {key: came_with.get(key) for key in SPECIAL_IDS}
    return dict(zip(SPECIAL_IDS, (tokenizer.bos_id, tokenizer.eod_id, tokenizer.eod_id), strict=True))


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def model_card(checkpoint: Checkpoint, dtype: torch.dtype, nvfp4: NVFP4Weights | None) -> str:
    """The README.md: the model, how and in which precision it was trained, and its validation losses."""
    config, trainer, model = checkpoint.config, checkpoint.trainer, checkpoint.config.model
    code = f"megatron_fp4 {trainer['version']} ({trainer.get('commit', 'commit unknown')})"
    if checkpoint.weights_only:
        origin = f"imported by {code} from {trainer['imported'].get('from', 'elsewhere')}"
    else:
        begun = trainer.get("initialized_from")
        weights = f", from the weights of {Path(begun['path']).name}" if begun else ""
        steps = f"{checkpoint.step:,} steps of {config.train.steps:,}{weights}"
        origin = f"trained by {code} on {checkpoint.tokens:,} tokens in {steps}"
    letters = ", ".join(f"`{letter}` {mixer.name}" for letter, mixer in MIXERS.items() if letter in model.pattern)
    lines = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- megatron_fp4",
        f"- {architecture_of(model)}\n---\n",
        f"# {model.name}\n",
        f"A base language model of {parameter_count(model).total:,} parameters, {origin}; sequences of "
        f"{sequence_length(checkpoint):,} tokens. Blocks ({letters}): `{model.pattern}`.\n",
        f"Exported by megatron_fp4 {__version__} ({revision()}). {_weights(dtype, nvfp4)}\n",
        "## Precision in training\n",
    ]
    if "plan" in trainer:
        plan, switch = trainer["plan"], config.precision.switch
        lines.append(f"Trained with `precision={config.precision.name}`; masters and optimizer in FP32.")
        if (at := trainer["switch"]["switched_at"]) is not None:
            lines.append(f"Precision switched to `{switch.target}` ({switch.scope}) before step {at + 1}.")
        lines.append(f"Quantized linears when this checkpoint was made: {plan['quantized_linears']}.")
    else:
        lines.append("These are imported weights; no run of this framework has trained them.")
    # The records of a run are beside its checkpoints.
    run_dir = checkpoint.folder.absolute().parent.parent
    if not checkpoint.weights_only and (last := last_validation(run_dir, checkpoint.step)) is not None:
        lines.append(f"\n## Held-out loss\n\nAfter step {last['step']:,}, in nats per token:\n")
        lines += [f"- {name}: {loss:.4f}" for name, loss in last["losses"].items() if loss is not None]
    return "\n".join(lines) + "\n"


def _weights(dtype: torch.dtype, nvfp4: NVFP4Weights | None) -> str:
    if nvfp4 is None:
        return f"Weights are the FP32 masters in {_name(dtype)}; A_log, D and dt_bias are in float32."
    trained = nvfp4.trained
    made = "quantized by the plan before the precision switch" if trained.before_switch else "as trained"
    return (
        f"Weights of {len(trained.nvfp4_linears())} of {len(trained.plan.rows)} linears are NVFP4 codes and scales, "
        f"{made} ({nvfp4.layout.name} layout); A_log, D and dt_bias are in float32, all others in bfloat16."
        f"{'' if nvfp4.largest_inputs is None else ' Scales of inputs were measured on held-out text.'}"
    )
