"""Write a checkpoint as a Hugging Face folder: `AutoModelForCausalLM.from_pretrained` and serving engines load it.

    python scripts/export_hf.py runs/8b/checkpoints/step_00002000 exported/8b
    python scripts/export_hf.py runs/8b exported/8b                     the newest checkpoint of a run
    python scripts/export_hf.py runs/8b exported/8b --dtype float32     the master weights as they are
    python scripts/export_hf.py runs/8b exported/8b --format nvfp4      what was trained in NVFP4 as codes and scales

Hybrids become `nemotron_h`, Transformers with RoPE `arcee`. The checkpoint may be of any mesh; one process reads it
tensor by tensor, after every file has been compared with its SHA-256. OUTPUT appears when it is whole.
An imported checkpoint without --dtype becomes again the folder that it was, byte for byte.
Exit code: 0 written, 2 refused, with one line on stderr.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import torch

from exchange.checkpoint import open_checkpoint
from exchange.hf.encoder import Encoder, PlainEncoder
from exchange.hf.export import SHARD_BYTES, export_again, export_hf
from exchange.hf.importing import is_import
from exchange.new_folder import check_output
from exchange.tokenizer import tokenizer_of
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.runtime.closed_pipe import end_without_reader
from pretrain import CONFIGS
from scripts.export import command, nvfp4

DTYPES = ("bfloat16", "float32", "float16")


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    try:
        export(options)
    except (ValueError, OSError, DamagedCheckpointError) as error:
        print(f"export_hf.py: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    parser.add_argument(
        "--format",
        choices=("hf", *nvfp4.FORMATS),
        default="hf",
        help="hf: weights in --dtype (the default). nvfp4: in the layout of ModelOpt, or of compressed-tensors",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default bfloat16)")
    parser.add_argument(
        "--shard-gib", type=float, help=f"size of a safetensors file at most (default {SHARD_BYTES / 2**30:g})"
    )
    nvfp4.add_arguments(parser)
    options = command.parse(parser, arguments)
    if options.shard_gib is not None and not 0 < options.shard_gib < math.inf:
        parser.error(f"--shard-gib={options.shard_gib}: give a size above 0")
    return options


def export(options: argparse.Namespace) -> None:
    """Open, compare, write."""
    nvfp4.check_arguments(options)
    checkpoint, began = open_checkpoint(options.checkpoint, CONFIGS), time.monotonic()
    plain = options.format == "hf"
    if is_import(checkpoint) and plain and options.dtype is None:
        _refuse_changes(options)
        check_output(options.output, checkpoint.folder)
        checkpoint.verify()
        export_again(checkpoint, options.output, progress=command.Progress())
    else:
        tokenizer = None if options.no_tokenizer else tokenizer_of(checkpoint, options.tokenizer)
        check_output(options.output, checkpoint.folder)
        encoder: Encoder = PlainEncoder(getattr(torch, options.dtype or "bfloat16"))
        if not plain:
            encoder = nvfp4.nvfp4_encoder(options, checkpoint)
        export_hf(
            checkpoint,
            options.output,
            encoder=encoder,
            tokenizer=tokenizer,
            shard_bytes=SHARD_BYTES if options.shard_gib is None else int(options.shard_gib * 2**30),
            progress=command.Progress(),
        )
        if tokenizer is None and not options.no_tokenizer:
            print("no tokenizer: the run knew of none; --tokenizer PATH adds one")
    size = sum(path.stat().st_size for path in options.output.iterdir())
    print(
        f"{options.output}: {checkpoint.config.model.name} after step {checkpoint.step}, {size / 2**20:,.1f} MiB in "
        f"{time.monotonic() - began:.1f} s"
    )


def _refuse_changes(options: argparse.Namespace) -> None:
    """Raise ValueError for what would make an import another folder than it was."""
    given = {
        "--tokenizer": options.tokenizer,
        "--no-tokenizer": options.no_tokenizer or None,
        "--shard-gib": options.shard_gib,
    }
    if changing := [name for name, value in given.items() if value is not None]:
        raise ValueError(
            f"{changing[0]}: without --dtype an import becomes the folder that it was, byte for byte; add --dtype, or "
            "leave it out"
        )


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
