"""One of our checkpoints as a checkpoint of Megatron-core, which Megatron-LM loads on any mesh.

    OUTPUT/
      latest_checkpointed_iteration.txt   the step
      iter_0000200/                       .metadata, *.distcp, metadata.json, common.pt
      megatron_args.sh                    the model as Megatron-LM's flags
      tokenizer/                          of the run, as a Hugging Face folder
      README.md                           what it is, and how to start from it

Only weights are in it. Parameters are read and written one at a time, large ones in parts.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data.tokenizer import TextTokenizer
from exchange.checkpoint import Checkpoint, check_tensors
from exchange.hf.export import sequence_length
from exchange.hf.tokenizer_files import tokenizer_files
from exchange.megatron.arguments import SCRIPTS, TOKENIZER, arguments_of, as_shell, check_fits
from exchange.megatron.names import Layers, Parameter, extra_states, model_class, parameters
from exchange.megatron.writing import PieceWriter
from exchange.new_folder import new_folder
from megatron_fp4 import __version__
from megatron_fp4.checkpoint import files

_PART = 1 << 25
"""Elements of a part of a large tensor: 128 MiB in FP32."""


class Exported(NamedTuple):
    """What was written: the number of tensors as Megatron has them, and of parameters."""

    tensors: int
    parameters: int


def export_megatron(
    checkpoint: Checkpoint,
    output: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: Layers = "stacked",
    tokenizer: TextTokenizer | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write `output`, which must not exist, whole or not at all.

    dtype: of the weights; A_log, D and dt_bias stay FP32, and a model in BF16 rounds them when it loads them. layers:
    of a GPTModel. tokenizer: of the run, None to leave it out. progress: is told the bytes of weights written, and all
    of them.
    Raises ValueError for a model that Megatron has not, a tokenizer that cannot be written, or an output that exists or
    lies inside the checkpoint; OSError; DamagedCheckpointError.
    """
    config = checkpoint.config.model
    check_fits(config)
    if layers == "numbered" and model_class(config) == "mamba":
        raise ValueError("the layers of Megatron's hybrid models are always numbered; leave --layers out")
    wanted = {parameter.name: torch.Size(parameter.shape) for parameter in parameters(config, layers)}
    check_tensors(wanted, checkpoint.tensors, checkpoint.name)
    length = sequence_length(checkpoint)
    of_tokenizer = {} if tokenizer is None else tokenizer_files(tokenizer, length)
    arguments = arguments_of(config, length, dtype == torch.bfloat16)
    with new_folder(output, checkpoint.folder) as staging:
        iteration = staging / f"iter_{checkpoint.step:07d}"
        iteration.mkdir()
        exported = _write_tensors(checkpoint, iteration, dtype, layers, progress)
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
        buffer = io.BytesIO()
        torch.save(common, buffer)
        files.write_file(iteration / "common.pt", buffer.getvalue())
        described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        described |= {"common_backend": "torch", "common_backend_version": 1}
        files.write_file(iteration / "metadata.json", json.dumps(described))
        files.write_file(staging / "latest_checkpointed_iteration.txt", str(checkpoint.step))
        files.write_file(staging / "megatron_args.sh", as_shell(arguments))
        files.write_file(staging / "README.md", _readme(checkpoint, output.name, dtype, bool(of_tokenizer)))
        if of_tokenizer:
            (staging / TOKENIZER).mkdir()
        for name, content in of_tokenizer.items():
            files.write_file(staging / TOKENIZER / name, content)
    return exported


def _write_tensors(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype, layers: Layers, progress: Callable[[int, int], None]
) -> Exported:
    every = list(parameters(checkpoint.config.model, layers))
    count = sum(torch.Size(parameter.shape).numel() for parameter in every)
    total = sum(
        torch.Size(section.shape).numel() * (torch.float32 if section.fp32 else dtype).itemsize
        for parameter in every
        for section in parameter.sections
    )
    done, keys = 0, set()
    with PieceWriter(folder) as writer:
        for parameter in every:
            for key, shape, offsets, piece in _pieces(checkpoint, parameter, dtype):
                writer.add(key, shape, offsets, piece)
                keys.add(key)
                done += piece.nbytes
                progress(done, total)
        for key in extra_states(checkpoint.config.model, layers):
            writer.add_object(key, torch.empty(0, dtype=torch.uint8))
        writer.finish()
    return Exported(len(keys), count)


def _pieces(
    checkpoint: Checkpoint, parameter: Parameter, dtype: torch.dtype
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """Key, whole shape, offsets and values of everything that a parameter becomes."""
    whole = len(parameter.sections) == 1
    values = None if whole else checkpoint.tensor(parameter.name)
    for section in parameter.sections:
        stored = parameter.stored_shape(section)
        rows, width = section.shape[0], torch.Size(section.shape[1:]).numel()
        step = max(_PART // width, 1) if whole else rows
        for first in range(0, rows, step):
            if values is None:
                part = checkpoint.tensor(parameter.name, slice(first, first + step))
            else:
                part = section.published(values)
            part = part.view(-1, *section.shape[1:]).to(torch.float32 if section.fp32 else dtype)
            place: tuple[int, ...] = (first, *(0 for _ in section.shape[1:]))
            if parameter.layer is not None:
                part, place = part[None], (parameter.layer[0], *place)
            yield section.name, stored, place, part


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

Weights after step {checkpoint.step} ({checkpoint.tokens:,} tokens) of a run of megatron_fp4 {__version__}, as a
distributed checkpoint (`torch_dist`) of Megatron-core's {theirs}, in {str(dtype).removeprefix("torch.")}; no optimizer
state is in it. `iter_{checkpoint.step:07d}/common.pt` has the model as arguments of Megatron-LM
(`--use-checkpoint-args`), `megatron_args.sh` as flags (core_v0.16):

```
{start_command(checkpoint, name, tokenizer)}
```

`--finetune` begins at iteration 0; `--no-load-optim --no-load-rng` goes on at iteration {checkpoint.step}. The
vocabulary has {model.vocab_size:,} rows: where the tensor-parallel size asks for more, Megatron fills them with zeros.
"""
