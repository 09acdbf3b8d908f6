"""Checkpoints of Megatron-core's GPTModel and MambaModel: one of ours written as one that Megatron-LM loads on any
mesh, and one of theirs as one of ours, without optimizer state.

    OUTPUT/
      latest_checkpointed_iteration.txt   the step
      iter_0000200/                       .metadata, *.distcp, metadata.json, common.pt
      megatron_args.sh                    the model as Megatron-LM's flags
      tokenizer/                          of the run, as a Hugging Face folder
      README.md                           what it is, and how to start from it

Parameters are read and written one at a time. An imported model's configuration is what shapes
tell, and Megatron-LM's arguments in `common.pt` where they do not (heads, state groups, RoPE, the norm's eps). What
neither tells, overrides have to say.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import TextTokenizer, load_tokenizer
from exchange.architectures import ours_of
from exchange.checkpoint import Checkpoint, check_tensors
from exchange.hf_export import Progress, sequence_length
from exchange.megatron_files import COMMON, TRACKER, MegatronFolder, PieceWriter
from exchange.megatron_model import (
    EMBEDDING,
    FINAL_NORMS,
    HEAD,
    SCRIPTS,
    Layers,
    Parameter,
    arguments_of,
    as_shell,
    check_fits,
    extra_states,
    model_class,
    parameters,
    settings_of,
)
from exchange.tokenizer import TOKENIZER_FILES, tokenizer_files
from exchange.weights_only import NewTensor, new_folder, write_weights_only
from megatron_fp4 import __version__
from megatron_fp4.checkpoint import files
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ModelConfig
from megatron_fp4.runtime.revision import revision
from models.pattern import check_model

TOKENIZER = "tokenizer"
"""Folder of an export's tokenizer."""


def export_megatron(
    checkpoint: Checkpoint,
    output: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: Layers = "stacked",
    tokenizer: TextTokenizer | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write `output`, which must not exist, whole or not at all.

    dtype: of the weights; A_log, D and dt_bias stay FP32, and a model in BF16 rounds them when it loads them. layers:
    of a GPTModel. tokenizer: of the run, None to leave it out.
    Raises ValueError for a model that Megatron has not, a tokenizer that cannot be written, or an output that exists or
    lies inside the checkpoint; OSError; DamagedCheckpointError.
    """
    config = checkpoint.config.model
    check_fits(config)
    if layers == "numbered" and model_class(config) == "mamba":
        raise ValueError("the layers of Megatron's hybrid models are always numbered; leave --layers out")
    wanted = {parameter.name: torch.Size(parameter.shape) for parameter in parameters(config, layers)}
    check_tensors(wanted, checkpoint)
    length = sequence_length(checkpoint)
    of_tokenizer = {} if tokenizer is None else tokenizer_files(tokenizer, length)
    arguments = arguments_of(config, length, dtype == torch.bfloat16)
    common = {
        "args": argparse.Namespace(
            **arguments,
            # Megatron then looks for neither.
            no_save_optim=True,
            no_save_rng=True,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            consumed_train_samples=0,
            consumed_valid_samples=0,
        ),
        "checkpoint_version": 3.0,
        "iteration": checkpoint.step,
        # With these Megatron makes the keys that it looks for.
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": layers == "numbered"},
    }
    described = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    buffer = io.BytesIO()
    torch.save(common, buffer)
    iteration = f"iter_{checkpoint.step:07d}"
    content: dict[str, str | bytes] = {
        f"{iteration}/{COMMON}": buffer.getvalue(),
        f"{iteration}/metadata.json": json.dumps(described),
        TRACKER: str(checkpoint.step),
        "megatron_args.sh": as_shell(arguments),
        "README.md": _readme(checkpoint, output.name, dtype, bool(of_tokenizer)),
        **{f"{TOKENIZER}/{name}": text for name, text in of_tokenizer.items()},
    }
    with new_folder(output, checkpoint.folder) as staging:
        (staging / iteration).mkdir()
        _write_tensors(checkpoint, staging / iteration, dtype, layers, progress)
        for name, text in content.items():
            (staging / name).parent.mkdir(exist_ok=True)
            files.write_file(staging / name, text)


def _write_tensors(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype, layers: Layers, progress: Progress
) -> None:
    every = list(parameters(checkpoint.config.model, layers))
    sections = (section for parameter in every for section in parameter.sections)
    total = sum(torch.Size(s.shape).numel() * (torch.float32 if s.fp32 else dtype).itemsize for s in sections)
    done = 0
    with PieceWriter(folder) as writer:
        for parameter in every:
            values = checkpoint.tensor(parameter.name)
            for section in parameter.sections:
                piece = section.published(values).view(section.shape).to(torch.float32 if section.fp32 else dtype)
                place = (0,) * piece.dim()
                if parameter.layer is not None:
                    piece, place = piece[None], (parameter.layer[0], *place)
                writer.add(section.name, parameter.stored_shape(section), place, piece)
                done += piece.nbytes
                progress(done, total)
        for key in extra_states(checkpoint.config.model, layers):
            writer.add_object(key, torch.empty(0, dtype=torch.uint8))
        writer.finish()


def start_command(checkpoint: Checkpoint, output: Path | str, tokenizer: bool) -> str:
    """How Megatron-LM starts from `output`."""
    script = SCRIPTS[model_class(checkpoint.config.model)]
    flags = f" --tokenizer-type HuggingFaceTokenizer --tokenizer-model {output}/{TOKENIZER}" if tokenizer else ""
    return (
        f"source {output}/megatron_args.sh\n"
        f'torchrun ... {script} "${{MEGATRON_ARGS[@]}}" --load {output} --finetune{flags} ...'
    )


def _readme(checkpoint: Checkpoint, name: str, dtype: torch.dtype, tokenizer: bool) -> str:
    model = checkpoint.config.model
    theirs = "GPTModel" if model_class(model) == "gpt" else "MambaModel"
    return f"""# {model.name}, for Megatron-LM

Weights after step {checkpoint.step} ({checkpoint.tokens:,} tokens) of a run of megatron_fp4
({checkpoint.trainer.get("commit", "commit unknown")}), exported by megatron_fp4 {__version__} ({revision()}), as a
distributed checkpoint (`torch_dist`) of Megatron-core's {theirs}, in {str(dtype).removeprefix("torch.")}; no optimizer
state is in it. `iter_{checkpoint.step:07d}/common.pt` has the model as arguments of Megatron-LM
(`--use-checkpoint-args`), `megatron_args.sh` as flags (core_v0.16):

```
{start_command(checkpoint, name, tokenizer)}
```

`--finetune` begins at iteration 0; `--no-load-optim --no-load-rng` resumes at iteration {checkpoint.step}. The
vocabulary has {model.vocab_size:,} rows: where the tensor-parallel size asks for more, Megatron fills them with zeros.
"""


def import_megatron(
    folder: Path,
    checkpoint: Path,
    config_dir: Path,
    *,
    name: str | None = None,
    overrides: Sequence[str] = (),
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Write `checkpoint`, which must not exist, whole or not at all, from what Megatron-LM saved to `folder`; returns
    its `model` settings. Weights become FP32 masters, exactly.

    name: what `model.name` becomes; None: the folder's. overrides: `model.key=value`, for what neither shapes nor
    arguments tell; `model.vocab_size` cuts rows that Megatron padded with. tokenizer: a folder or a file of it, to be
    kept; None: what an export of ours has beside it.
    Raises ValueError, in one line, for what is not such a folder or none of our models, and OSError.
    """
    opened = MegatronFolder(folder)
    given, base = _given(overrides, config_dir)
    try:
        told = settings_of(opened.arguments)
    except ValueError as error:
        raise ValueError(f"{opened.folder / COMMON}: {error}") from error
    pattern, layers = _pattern(opened)
    settings = _settings(opened, pattern, layers, {**told, **given})
    origin = folder.resolve()
    if origin.name.startswith("iter_") or origin.name == "release":
        origin = origin.parent
    settings = {"name": name or origin.name, **settings, **given}
    try:
        config = dataclasses.replace(base, model=dataclasses.replace(ModelConfig(), **settings))
        check_model(config.model)
    except ValueError as error:  # ConfigError is one, pydantic's another, of several lines
        raise ValueError(f"{opened.folder}: {' '.join(str(error).split())}") from error
    expected = list(parameters(config.model, layers))
    _check_tensors(opened, expected, config.model)
    if tokenizer is None:  # what an export writes beside the iteration
        beside = (folder / TOKENIZER, folder.resolve().parent / TOKENIZER)
        tokenizer = next((path for path in beside if path.is_dir()), None)
    kept, fingerprint = _tokenizer(tokenizer, config.model.vocab_size)
    length = opened.arguments.get("max_position_embeddings")
    write_weights_only(
        checkpoint,
        config,
        (NewTensor(p.name, p.shape, partial(_load, opened, p)) for p in expected),
        imported={
            "format": "megatron",
            "from": origin.name,
            "iteration": opened.iteration,
            "sequence_length": length if type(length) is int else None,
        },
        tokenizer=fingerprint,
        extra_files=kept,
    )
    return settings


def _tokenizer(path: Path | None, vocab_size: int) -> tuple[dict[str, bytes], str | None]:
    """The files of a tokenizer by the names of a Hugging Face folder, and its fingerprint."""
    if path is None:
        return {}, None
    found = {name: path / name for name in TOKENIZER_FILES if (path / name).is_file()}
    if path.is_file():
        found = {"tokenizer.model" if path.suffix == ".model" else "tokenizer.json": path}
    if not {"tokenizer.json", "tokenizer.model"} & {*found}:
        raise ValueError(f"{path} has neither tokenizer.json nor tokenizer.model; give a folder or a file that has")
    opened = load_tokenizer(path)
    if opened.vocab_size > vocab_size:
        raise ValueError(f"{path} has {opened.vocab_size} ids and the model only {vocab_size}; give its own tokenizer")
    return {name: file.read_bytes() for name, file in found.items()}, opened.fingerprint()


def _given(overrides: Sequence[str], config_dir: Path) -> tuple[dict[str, Any], Config]:
    """What the overrides set, and a run's configuration with them."""
    for override in overrides:
        if not override.startswith("model.") or "=" not in override:
            raise ValueError(f"{override}: give model.key=value, such as model.num_kv_heads=8")
    config = compose_config(list(overrides), config_dir)
    keys = (override.partition("=")[0].removeprefix("model.") for override in overrides)
    return {key: getattr(config.model, key) for key in keys}, config


def _settings(opened: MegatronFolder, pattern: str, layers: Layers, known: Mapping[str, Any]) -> dict[str, Any]:
    """Of the model, what shapes and `known` tell. Raises ValueError if something is told by none of them."""
    wanted = ["norm_eps"] + ["num_query_heads", "num_kv_heads", "head_dim", "rope"] * ("*" in pattern)
    wanted += ["mamba_num_groups"] * ("M" in pattern) + ["rope_base"] * bool("*" in pattern and known.get("rope"))
    if missing := [key for key in wanted if key not in known]:
        listing = " ".join(f"model.{key}=..." for key in missing)
        raise ValueError(f"{opened.folder}: neither shapes nor arguments ({COMMON}) tell all; add {listing}")
    try:
        settings = {"pattern": pattern, **_sizes(opened, pattern, layers, known.get("mamba_num_groups"))}
    except (IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{opened.folder}: shapes of its tensors are those of no model; copy it again") from error
    settings |= {key: known[key] for key in (*wanted, "init_std") if key in known}
    return settings


def _pattern(opened: MegatronFolder) -> tuple[str, Layers]:
    """The letters, from which modules each layer has; and how layers are stored."""
    modules: dict[int, set[str]] = {}
    for key in opened.tensors:
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", key):
            modules.setdefault(int(match[1]), set()).add(match[2].partition(".")[0])
    stacked = [key for key in opened.tensors if re.fullmatch(r"decoder\.layers\.\D.*", key)]
    if FINAL_NORMS["gpt"] in opened.tensors and (modules or stacked):
        return (
            ("*-" * (opened.shape(stacked[0]) or (1,))[0], "stacked") if stacked else ("*-" * len(modules), "numbered")
        )
    if not modules:
        raise ValueError(f"{opened.folder} has no tensor decoder.layers...; it is no GPTModel and no MambaModel")
    if stacked or sorted(modules) != list(range(len(modules))):
        raise ValueError(f"{opened.folder}: its layers are not numbered 0 to {len(modules) - 1}; copy it again")
    letters, known = "", {"mixer": "M", "self_attention": "*", "mlp": "-"}
    for number in range(len(modules)):
        kinds = modules[number] & known.keys()
        if len(kinds) != 1:
            listing = ", ".join(sorted(modules[number]))
            raise ValueError(
                f"{opened.folder}: layer {number} has {listing}; a layer of a hybrid is one of {', '.join(known)}"
            )
        letters += known[kinds.pop()]
    return letters, "numbered"


def _sizes(opened: MegatronFolder, pattern: str, layers: Layers, groups: int | None) -> dict[str, Any]:
    """What shapes tell."""
    if HEAD not in opened.tensors:
        raise ValueError(
            f"{opened.folder} has no {HEAD}: its embedding and head are one, and models here have two; train with "
            "--untie-embeddings-and-output-weights"
        )
    rows = opened.shape(EMBEDDING)
    if len(rows) != 2:
        raise ValueError(f"{opened.folder} has no {EMBEDDING}; it is not the whole of a model")
    sizes: dict[str, Any] = {"vocab_size": rows[0], "hidden_dim": rows[1]}

    def shape(letter: str, module: str) -> tuple[int, ...]:
        if layers == "stacked":
            return opened.shape(f"decoder.layers.{module}")[1:]
        place = pattern.index(letter)
        number = place // 2 if FINAL_NORMS["gpt"] in opened.tensors else place
        return opened.shape(f"decoder.layers.{number}.{module}")

    if "-" in pattern and (up := shape("-", "mlp.linear_fc1.weight")) and (down := shape("-", "mlp.linear_fc2.weight")):
        if up[0] == 2 * down[1]:
            raise ValueError(
                f"{opened.folder}: linear_fc1 has twice the rows of linear_fc2's columns, a gate that no FFN here has"
            )
        sizes["ffn_dim"] = down[1]
    if "M" in pattern and (heads := shape("M", "mixer.A_log")) and (z := shape("M", "mixer.in_proj.weight.z")):
        # Megatron's chunk; it moves rounding only.
        sizes |= {"mamba_num_heads": heads[0], "mamba_head_dim": z[0] // heads[0], "mamba_chunk_size": 128}
        if (conv := shape("M", "mixer.conv1d.weight.x")) and len(conv) == 3:
            sizes["mamba_conv_width"] = conv[2]
        if (b := shape("M", "mixer.in_proj.weight.B")) and groups:
            sizes["mamba_state_dim"] = b[0] // groups
    return sizes


def _check_tensors(opened: MegatronFolder, expected: Sequence[Parameter], model: ModelConfig) -> None:
    """Raise ValueError, naming the first tensor, unless the model has exactly these."""
    shapes = {section.name: each.stored_shape(section) for each in expected for section in each.sections}
    for key, shape in shapes.items():
        have = opened.shape(key)
        if not have:
            raise ValueError(f"{opened.folder} has no {key}, which a model of the pattern {model.pattern} has")
        cut = key in (EMBEDDING, HEAD) and have[0] > shape[0] and have[1:] == shape[1:]
        if have != shape and not cut:
            raise ValueError(
                f"{opened.folder}: {key} is {list(have)} there, {list(shape)} in the model that it says it is"
            )
    if unknown := [key for key in opened.tensors if key not in shapes]:
        raise ValueError(f"{opened.folder} has {unknown[0]}: no model here has such a tensor")


def _load(opened: MegatronFolder, parameter: Parameter) -> Tensor:
    layer = None if parameter.layer is None else parameter.layer[0]
    if len(parameter.sections) == 1:
        key, rows = parameter.sections[0].name, parameter.shape[0]
        return opened.tensor(key, layer, rows if key in (EMBEDDING, HEAD) else None)
    return ours_of(parameter.sections, {part.name: opened.tensor(part.name, layer) for part in parameter.sections})
