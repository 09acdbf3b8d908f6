"""One of our checkpoints as a checkpoint of Megatron-core, which Megatron-LM loads on any mesh.

    OUTPUT/
      latest_checkpointed_iteration.txt   the step
      iter_0000200/                       .metadata, *.distcp, metadata.json, common.pt
      megatron_args.sh                    the model as Megatron-LM's flags
      README.md                           what it is, and how to start from it

Only weights are in it. Parameters are read and written one at a time, large ones in parts.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from exchange.checkpoint import Checkpoint
from exchange.megatron.arguments import SCRIPTS, arguments_of, as_shell, check_fits
from exchange.megatron.names import Layers, Parameter, extra_states, model_class, parameters
from exchange.megatron.writing import PieceWriter
from megatron_fp4 import __version__
from megatron_fp4.checkpoint import files

_PART = 1 << 25
"""Elements of a part of a large tensor: 128 MiB in FP32."""


class Exported(NamedTuple):
    """What was written: the number of tensors as Megatron has them, of parameters, and the files' bytes."""

    tensors: int
    parameters: int
    bytes: int


def export_megatron(
    checkpoint: Checkpoint, output: Path, *, dtype: torch.dtype = torch.bfloat16, layers: Layers = "stacked"
) -> Exported:
    """Write `output`, which must not exist, whole or not at all.

    dtype: of the weights; A_log, D and dt_bias stay FP32, and a model in BF16 rounds them when it loads them. layers:
    of a GPTModel. Raises ValueError for a model that Megatron has not, FileExistsError, OSError,
    DamagedCheckpointError.
    """
    config = checkpoint.config
    check_fits(config.model)
    if layers == "numbered" and model_class(config.model) == "mamba":
        raise ValueError("the layers of Megatron's hybrid models are always numbered; leave --layers out")
    if output.exists() or output.is_symlink():
        raise FileExistsError(f"{output} exists already; name another folder, or remove it")
    staging = output.with_name(f"{output.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    step = checkpoint.step
    iteration = staging / f"iter_{step:07d}"
    iteration.mkdir(parents=True)
    try:
        exported = _write_tensors(checkpoint, iteration, dtype, layers)
        arguments = arguments_of(config.model, config.train.sequence_length, dtype == torch.bfloat16)
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
            "iteration": step,
            "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": layers == "numbered"},
        }
        buffer = io.BytesIO()
        torch.save(common, buffer)
        files.write_file(iteration / "common.pt", buffer.getvalue())
        described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        described |= {"common_backend": "torch", "common_backend_version": 1}
        files.write_file(iteration / "metadata.json", json.dumps(described))
        files.write_file(staging / "latest_checkpointed_iteration.txt", str(step))
        files.write_file(staging / "megatron_args.sh", as_shell(arguments))
        files.write_file(staging / "README.md", _readme(checkpoint, output, dtype))
        files.sync_folder(iteration)
        files.sync_folder(staging)
        os.rename(staging, output)
        files.sync_folder(output.parent)
        return exported
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_tensors(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype, layers: Layers) -> Exported:
    writer = PieceWriter(folder)
    keys: set[str] = set()
    count = 0
    try:
        for parameter in parameters(checkpoint.config.model, layers):
            if tuple(checkpoint.tensors.get(parameter.name, ())) != parameter.shape:
                raise ValueError(f"{checkpoint.name} has no {parameter.name} of shape {list(parameter.shape)}")
            count += torch.Size(parameter.shape).numel()
            for key, shape, offsets, piece in _pieces(checkpoint, parameter, dtype):
                writer.add(key, shape, offsets, piece)
                keys.add(key)
        for key in extra_states(checkpoint.config.model, layers):
            writer.add_object(key, torch.empty(0, dtype=torch.uint8))
        return Exported(len(keys), count, writer.finish())
    finally:
        writer.abandon()


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
            part = (
                checkpoint.tensor(parameter.name, slice(first, first + step))
                if values is None
                else section.published(values)
            )
            part = part.view(-1, *section.shape[1:]).to(torch.float32 if section.fp32 else dtype)
            place: tuple[int, ...] = (first, *(0 for _ in section.shape[1:]))
            if parameter.layer is not None:
                part, place = part[None], (parameter.layer[0], *place)
            yield section.name, stored, place, part


def _readme(checkpoint: Checkpoint, output: Path, dtype: torch.dtype) -> str:
    config = checkpoint.config
    kind = model_class(config.model)
    name = "GPTModel" if kind == "gpt" else "MambaModel"
    return f"""# {config.model.name}, for Megatron-LM

Weights of step {checkpoint.step} ({checkpoint.tokens:,} tokens) of a run of megatron_fp4 {__version__}, as a
distributed checkpoint (`torch_dist`) of Megatron-core's {name}, in {str(dtype).removeprefix("torch.")}. There is no
optimizer state in it. In `iter_{checkpoint.step:07d}/common.pt` is the model as arguments of Megatron-LM, and in
`megatron_args.sh` the same as flags (core_v0.16):

```
source {output.name}/megatron_args.sh
torchrun ... {SCRIPTS[kind]} "${{MEGATRON_ARGS[@]}}" --load {output.name} --finetune ...
```

`--finetune` begins at iteration 0; `--no-load-optim --no-load-rng` goes on at iteration {checkpoint.step}. The
vocabulary has {config.model.vocab_size:,} rows: where the tensor-parallel size asks for more, Megatron fills them with
zeros. The tokenizer is the run's own and not in this folder.
"""
