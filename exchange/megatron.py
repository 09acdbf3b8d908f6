"""Exports to and imports from checkpoints of Megatron-core's GPTModel and MambaModel (`torch_dist`), without Megatron
and without a GPU. Megatron-LM loads an export on any mesh. Optimizer state is left out in both directions.

    OUTPUT/
      latest_checkpointed_iteration.txt   the step
      iter_0000200/                       .metadata, *.distcp, metadata.json, common.pt
      megatron_args.sh                    the model as Megatron-LM's flags
      tokenizer/                          the run's tokenizer, as a Hugging Face folder
      README.md                           what it is, and how to start from it

torch.distributed.checkpoint writes an iteration: `.distcp` files with one torch.save after another, and `.metadata`
with the place of each part of each tensor. Besides tensors Megatron saves small objects, each a torch.save of a list.

The configuration of an imported model comes from the shapes of tensors, from Megatron-LM's arguments in `common.pt`
(heads, state groups, RoPE, the norm's eps), and from overrides for what neither tells. Reading is safe for untrusted
files, because nothing that a pickle names is imported or called: `.metadata` and the plain values of `common.pt` are
read by megatron_fp4/checkpoint/pickles.py, and tensors with torch's `weights_only`.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from data.tokenizer import TextTokenizer
from exchange import megatron_model
from exchange.checkpoint import Checkpoint, check_tensors, read_region
from exchange.hf_export import sequence_length
from exchange.tokenizer import check_exported_tokenizer, exported_tokenizer, kept_tokenizer
from exchange.weights_only import new_folder, write_pieces, write_weights_only
from megatron_fp4 import __version__
from megatron_fp4.checkpoint import files
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.checkpoint.pickles import read_pickle
from megatron_fp4.checkpoint.shards import METADATA, TensorInfo, read_metadata
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.logging.console import tracked
from megatron_fp4.runtime.revision import revision
from models.mixer import Mixer
from models.pattern import MIXERS, check_model, pattern_of
from models.published import from_published, shape_of

COMMON, FORMAT, TRACKER = "common.pt", "metadata.json", "latest_checkpointed_iteration.txt"
TOKENIZER = "tokenizer"
OBJECT = "__1_0.distcp"
"""The file with the content of all extra states, which are empty."""
_MOST_OF_COMMON = 1 << 28  # bytes


# Export


def export_megatron(
    checkpoint: Checkpoint,
    output: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: TextTokenizer | None = None,
) -> None:
    """Write `output`, which must not exist; it appears only when it is complete.

    dtype: of the weights; A_log, D and dt_bias stay FP32 (a model in BF16 rounds them when it loads them). tokenizer:
    the run's; None to leave it out.
    Raises ValueError for a model that Megatron does not have, a tokenizer that cannot be written, or an output that
    exists or is inside the checkpoint; OSError; DamagedCheckpointError.
    """
    config = checkpoint.config.model
    length = sequence_length(checkpoint)
    arguments = megatron_model.arguments_of(config, length, dtype == torch.bfloat16)
    expected = {each.name: shape_of(each.sections) for each in megatron_model.parameters(config)}
    check_tensors(checkpoint.tensors, expected, checkpoint.folder)
    files_of_tokenizer = exported_tokenizer(checkpoint, tokenizer, length)
    common = {
        "args": argparse.Namespace(
            **arguments,
            # With these Megatron does not look for optimizer and random states.
            no_save_optim=True,
            no_save_rng=True,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            consumed_train_samples=0,
            consumed_valid_samples=0,
        ),
        "checkpoint_version": 3.0,
        "iteration": checkpoint.step,
        # These select the keys under which Megatron looks for tensors.
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": False},
    }
    described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    iteration = f"iter_{checkpoint.step:07d}"
    content: dict[str, str | bytes] = {
        f"{iteration}/{COMMON}": _saved(common),
        f"{iteration}/{FORMAT}": json.dumps(described),
        TRACKER: str(checkpoint.step),
        "megatron_args.sh": megatron_model.as_shell(arguments),
        "README.md": _readme(checkpoint, output.name, dtype, tokenizer is not None),
        **{f"{TOKENIZER}/{name}": text for name, text in files_of_tokenizer.items()},
    }
    with new_folder(output, checkpoint.folder) as staging:
        (staging / iteration).mkdir()
        size = files.write_file(staging / iteration / OBJECT, _saved([torch.empty(0, dtype=torch.uint8)])).size
        objects = dict.fromkeys(megatron_model.extra_states(config), (OBJECT, 0, size))
        write_pieces(staging / iteration, _pieces(checkpoint, dtype), objects)
        for name, text in content.items():
            (staging / name).parent.mkdir(exist_ok=True)
            files.write_file(staging / name, text)
        check_exported_tokenizer(staging / TOKENIZER, checkpoint, tokenizer)


def _saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _pieces(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[TensorInfo, Tensor, Sequence[int]]]:
    """(complete tensor, values, offsets of the values in it) for every tensor of an iteration, layer by layer."""
    for parameter in tracked([*megatron_model.parameters(checkpoint.config.model)], "parameters written"):
        values = checkpoint.tensor(parameter.name)
        for section in parameter.sections:
            piece = section.published(values).to(torch.float32 if section.fp32 else dtype)
            offsets = [0] * piece.dim()
            if parameter.layer is not None:
                piece, offsets = piece[None], [parameter.layer[0], *offsets]
            yield TensorInfo((section.name,), piece.dtype, parameter.stored_shape(section)), piece, offsets


def start_command(checkpoint: Checkpoint, output: Path | str, tokenizer: bool) -> str:
    """The command that starts Megatron-LM from `output`."""
    script = "pretrain_gpt.py" if megatron_model.is_gpt(checkpoint.config.model) else "pretrain_mamba.py"
    flags = f" --tokenizer-type HuggingFaceTokenizer --tokenizer-model {output}/{TOKENIZER}" if tokenizer else ""
    return (
        f"source {output}/megatron_args.sh\n"
        f'torchrun ... {script} "${{MEGATRON_ARGS[@]}}" --load {output} --finetune{flags} ...'
    )


def _readme(checkpoint: Checkpoint, name: str, dtype: torch.dtype, tokenizer: bool) -> str:
    model = checkpoint.config.model
    return f"""# {model.name}, for Megatron-LM

Weights after step {checkpoint.step} ({checkpoint.tokens:,} tokens) of a run of megatron_fp4
({checkpoint.trainer.get("commit", "commit unknown")}), exported by megatron_fp4 {__version__} ({revision()}), as a
distributed checkpoint (`torch_dist`) of Megatron-core, in {str(dtype).removeprefix("torch.")}, without optimizer state.
`iter_{checkpoint.step:07d}/common.pt` has the model as arguments of Megatron-LM (`--use-checkpoint-args`),
`megatron_args.sh` as flags (core_v0.16; with experts or multi-token prediction core_v0.19):

```
{start_command(checkpoint, name, tokenizer)}
```

`--finetune` begins at iteration 0; `--no-load-optim --no-load-rng` resumes at iteration {checkpoint.step}. The
vocabulary has {model.vocab_size:,} rows: where the tensor-parallel size asks for more, Megatron fills them with zeros.
"""


# Import


def import_megatron(
    folder: Path, checkpoint: Path, config_dir: Path, *, overrides: Sequence[str] = (), tokenizer: Path | None = None
) -> dict[str, Any]:
    """Write `checkpoint`, which must not exist, from what Megatron-LM saved to `folder`; returns its `model` settings.
    The checkpoint appears only when it is complete. Weights are converted to FP32 masters exactly.

    overrides: `model.key=value`, for settings that neither shapes nor arguments tell; `model.vocab_size` removes the
    rows with which Megatron padded the vocabulary. `model.name` is by default the name of the folder. tokenizer: a
    folder or a file to save with the checkpoint; None: the one beside an export of ours, if there is one.
    Raises ValueError, in one line, for another kind of folder or a model that is not ours; OSError.
    """
    try:
        if wrong := [text for text in overrides if not text.startswith("model.") or "=" not in text]:
            raise ValueError(f"{wrong[0]}: give model.key=value, such as model.num_kv_heads=8")
        base = compose_config(list(overrides), config_dir)
        keys = (text.partition("=")[0].removeprefix("model.") for text in overrides)
        given = {key: getattr(base.model, key) for key in keys}
        opened, origin = MegatronFolder(folder), folder.resolve()
        if origin.name.startswith("iter_") or origin.name == "release":
            origin = origin.parent
        told, layers = _settings(opened, given)
        settings = {"name": origin.name, **told, **given}
        config = replace(base, model=replace(ModelConfig(), **settings))
        check_model(config.model)
        expected = list(megatron_model.parameters(config.model, layers))
    except ValueError as error:  # ConfigError, or pydantic's error, which has several lines
        raise ValueError(f"{folder}: {' '.join(str(error).split())}") from error
    stored = {section.name: each.stored_shape(section) for each in expected for section in each.sections}
    shapes = {key: opened.shape(key) for key in opened.tensors}
    for key in (megatron_model.EMBEDDING, megatron_model.HEAD):  # Megatron may have padded the vocabulary
        shapes[key] = min(shapes[key], (stored[key][0], *shapes[key][1:]))
    check_tensors(shapes, stored, folder)
    if tokenizer is None:  # `export_megatron` writes one beside the iteration
        beside = (folder / TOKENIZER, folder.resolve().parent / TOKENIZER)
        tokenizer = next((path for path in beside if path.is_dir() and not path.is_symlink()), None)
    kept, fingerprint = ({}, None) if tokenizer is None else kept_tokenizer(tokenizer, config.model.vocab_size)
    if tokenizer is not None and fingerprint is None:
        raise ValueError(f"{tokenizer} has neither tokenizer.json nor tokenizer.model; give the folder or file of one")
    length = opened.arguments.get("max_position_embeddings")
    write_weights_only(
        checkpoint,
        config,
        ((each.name, _load(opened, each)) for each in expected),
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


def _settings(opened: MegatronFolder, given: Mapping[str, Any]) -> tuple[dict[str, Any], megatron_model.Layers]:
    """The model's settings, from shapes, arguments and `given`, and how its layers are stored. Raises ValueError if a
    setting is in none of them."""
    main, sets, first, layers = _blocks(opened)
    known = {**megatron_model.settings_of(opened.arguments, first), **given}
    forms = {mixer: mixer.megatron for mixer in first if mixer.megatron is not None}
    wanted = ["norm_eps", *(key for form in forms.values() for key in form.told)]
    wanted += ["rope_base"] * bool("rope" in wanted and known.get("rope"))
    if missing := [key for key in wanted if key not in known]:
        listing = " ".join(f"model.{key}=..." for key in missing)
        raise ValueError(f"neither shapes nor arguments ({COMMON}) tell all settings; add {listing}")
    if megatron_model.HEAD not in opened.tensors:
        raise ValueError(
            f"there is no {megatron_model.HEAD}, as models here have; train with --untie-embeddings-and-output-weights"
        )

    def shapes_in(module: str) -> Callable[[str], tuple[int, ...]]:
        return lambda tensor: opened.shape(f"{module}.{tensor}")[1 if layers == "stacked" else 0 :]

    optional = ["init_std", *(key for form in forms.values() for key in form.arguments)]
    optional += ["mtp_loss_scaling_factor"] * bool(sets)
    settings: dict[str, Any] = {key: known[key] for key in (*wanted, *optional) if key in known}
    depths = opened.arguments.get("mtp_num_layers")
    if len(sets) == 1 and type(depths) is int and depths > 1:
        sets, settings["mtp_use_repeated_layer"] = sets * depths, True
    try:
        settings["vocab_size"], settings["hidden_dim"] = opened.shape(megatron_model.EMBEDDING)
        for mixer, form in forms.items():
            settings |= form.sizes(shapes_in(f"{first[mixer]}{form.module}"), known)
    except (KeyError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"the shapes of its tensors do not fit a model ({error})") from error
    return settings | {"pattern": "/".join((main, *sets))}, layers


def _blocks(opened: MegatronFolder) -> tuple[str, list[str], dict[type[Mixer], str], megatron_model.Layers]:
    """The pattern of the model, and of each set of weights of multi-token prediction, from the keys of their layers;
    for each kind of block the prefix of the first layer with one; how the layers are stored."""
    layer = megatron_model.gpt_layer(_is_gated(opened))
    mixers = {mixer.megatron.norm_key: mixer for mixer in (*MIXERS.values(), *layer) if mixer.megatron is not None}
    modules = dict.fromkeys(key.partition(".")[0] for key in mixers)
    stacks: dict[str, dict[int, set[str]]] = {}
    for key in opened.tensors:
        if match := re.fullmatch(r"(decoder\.|mtp\.layers\.\d+\.mtp_model_layer\.)layers\.(\d+)\.(.+)", key):
            stacks.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    numbered = stacks.pop("decoder.", {})
    stacked = [key for key in opened.tensors if re.fullmatch(r"decoder\.layers\.\D.*", key)]
    if megatron_model.GPT_NORM in opened.tensors and (stacked or numbered):
        for argument in ("num_experts", "mtp_num_layers"):
            if value := opened.arguments.get(argument):
                raise ValueError(
                    f"Megatron's {argument}={value} can be imported from a MambaModel, not from a GPTModel"
                )
        count = (opened.shape(stacked[0]) or (1,))[0] if stacked else len(numbered)
        prefix = "decoder.layers." if stacked else "decoder.layers.0."
        return pattern_of(layer) * count, [], dict.fromkeys(layer, prefix), "stacked" if stacked else "numbered"
    if stacked or sorted(numbered) != [*range(len(numbered))] or not numbered:
        raise ValueError("it has no decoder.layers numbered from 0, so it is no complete GPTModel or MambaModel")
    patterns, first = list[str](), dict[type[Mixer], str]()
    for stack, layers in (("decoder.", numbered), *sorted(stacks.items())):
        kinds = []
        for number, keys in sorted(layers.items()):
            if len(norms := keys & mixers.keys()) != 1:
                has = ", ".join(sorted({key.partition(".")[0] for key in keys}))
                raise ValueError(f"layer {number} has {has}; a layer of a hybrid is one of {', '.join(modules)}")
            kinds.append(mixers[norms.pop()])
            first.setdefault(kinds[-1], f"{stack}layers.{number}.")
        patterns.append(pattern_of(kinds))
    return patterns[0], patterns[1:], first, "numbered"


def _is_gated(opened: MegatronFolder) -> bool:
    """Whether its FFNs are gated: by its arguments, else because their first linear is twice as wide as the last."""
    for key in opened.tensors:
        last = key.replace("linear_fc1", "linear_fc2")
        if key.endswith("mlp.linear_fc1.weight") and last in opened.tensors:
            wider = opened.shape(key)[-2] == 2 * opened.shape(last)[-1]
            return bool(opened.arguments.get("swiglu", wider))
    return False


def _load(opened: MegatronFolder, parameter: megatron_model.Parameter) -> Tensor:
    layer = None if parameter.layer is None else parameter.layer[0]
    tensors = {each.name: opened.tensor(each.name, parameter.stored_shape(each), layer) for each in parameter.sections}
    return from_published(parameter.sections, tensors)


class MegatronFolder:
    """The folder of an iteration. folder: its path. tensors: the model's, by key. arguments: Megatron-LM's arguments
    that are plain values; empty if none were saved. iteration: 0 if it is unknown.

    Raises ValueError or DamagedCheckpointError for another kind of folder, another format, or an incomplete one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _iteration_in(folder)
        if (backend := _backend(self.folder / FORMAT)) != "torch_dist":
            raise ValueError(f"its {FORMAT} has the format {backend}; save it with --ckpt-format torch_dist")
        self._metadata: Metadata = read_metadata(files.read_plain(self.folder / METADATA), foreign=True)
        self.arguments, self.iteration = _read_common(self.folder, self._metadata)
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: saved
            for name, saved in self._metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata) and "optimizer" not in name.split(".")
        }

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a complete tensor. Raises KeyError if there is none."""
        return tuple(self.tensors[key].size)

    def tensor(self, key: str, shape: Sequence[int], layer: int | None = None) -> Tensor:
        """A tensor, FP32 on the CPU. shape: without the rows with which Megatron padded it. layer: only this index of
        the first axis, without that axis.

        Raises ValueError for pieces that are missing or unreadable, and for other types than FP32, BF16 and FP16.
        """
        saved = self.tensors[key]
        if saved.properties.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{self.folder}: {key} is {saved.properties.dtype}; FP32, BF16 and FP16 can be imported")
        region = [slice(0, size) for size in shape]
        if layer is not None:
            region[0] = slice(layer, layer + 1)
        try:
            result = read_region(self.folder, self._metadata, key, region)
        except DamagedCheckpointError as error:
            raise ValueError(f"{self.folder}: {error}; copy the folder again") from error
        return result if layer is None else result[0]


def _iteration_in(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError("it is not a folder; give the folder of --save, or an iter_* folder in it")
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    name = files.read_plain(tracker, 1 << 10).decode(errors="replace").strip()
    iteration = folder / (f"iter_{int(name):07d}" if name.isdecimal() else "release")
    if not iteration.is_dir():
        raise ValueError(f"{tracker} names {name[:40]!r}, but {iteration} is missing; give another iter_* folder")
    return iteration


def _backend(path: Path) -> Any:
    """The format that Megatron wrote; None if it is not recorded."""
    try:
        return json.loads(files.read_plain(path))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_common(folder: Path, metadata: Metadata) -> tuple[dict[str, Any], int]:
    """The plain values of `args` in common.pt, and its `iteration`; megatron-core 0.19 saves an object instead of the
    file. Raises DamagedCheckpointError if it cannot be read."""
    place = metadata.storage_data.get(MetadataIndex("common_state/shard_0_1"))
    path = folder / COMMON
    if place is not None and not path.exists():
        path = folder / Path(place.relative_path).name
        with files.open_plain(path) as file:
            file.seek(place.offset)
            content = file.read(min(place.length, _MOST_OF_COMMON))
    elif path.exists():
        content = files.read_plain(path)
    else:
        return {}, 0
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            (entry,) = (each for each in archive.infolist() if each.filename.endswith("/data.pkl"))
            if entry.compress_type != zipfile.ZIP_STORED:  # it could become any size
                raise ValueError(f"{entry.filename} is compressed, which torch does not do")
            common = read_pickle(archive.read(entry))
        common = common[0] if isinstance(common, list) else common
        state, iteration = getattr(common.get("args"), "state", None), common.get("iteration")
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedCheckpointError(f"{path.name} is not readable: {type(error).__name__}: {error}") from error
    plain = {str(k): v for k, v in state.items() if _is_plain(v)} if isinstance(state, dict) else {}
    return plain, iteration if type(iteration) is int and iteration >= 0 else 0


def _is_plain(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(each, (bool, int, float, str, type(None))) for each in values)
