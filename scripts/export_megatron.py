"""Write a checkpoint as one that Megatron-LM loads: Megatron-core's distributed checkpoint (`torch_dist`).

    python scripts/export_megatron.py runs/8b/checkpoints/step_00002000 exported/megatron_8b
    python scripts/export_megatron.py runs/8b exported/megatron_8b        the newest checkpoint of a run

A model of the pattern `*-*-...` becomes a GPTModel, any other a MambaModel. The checkpoint may be of any mesh; one
process reads it tensor by tensor, after every file has been compared with its SHA-256, and Megatron loads the result on
any mesh. OUTPUT gets the weights without optimizer state, the model as Megatron-LM's flags (megatron_args.sh), the
run's tokenizer and a README.md; it appears when it is whole.
Exit code: 0 written, 2 refused, with one line on stderr.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from exchange.checkpoint import open_checkpoint
from exchange.megatron.export import export_megatron, start_command
from exchange.new_folder import check_output
from exchange.tokenizer import tokenizer_of
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.runtime.closed_pipe import end_without_reader
from pretrain import CONFIGS
from scripts.export import command


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    try:
        export(options)
    except (ValueError, OSError, DamagedCheckpointError) as error:
        print(f"export_megatron.py: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    dtypes = "of the weights (default bfloat16); A_log, D and dt_bias are always float32"
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help=dtypes)
    layers = "of a GPTModel: one tensor for all of them (default), or one each, as with non_homogeneous_layers"
    parser.add_argument("--layers", choices=("stacked", "numbered"), default="stacked", help=layers)
    return command.parse(parser, arguments)


def export(options: argparse.Namespace) -> None:
    """Open, compare, write."""
    checkpoint, began = open_checkpoint(options.checkpoint, CONFIGS), time.monotonic()
    check_output(options.output, checkpoint.folder)
    tokenizer = None if options.no_tokenizer else tokenizer_of(checkpoint, options.tokenizer)
    checkpoint.verify()
    dtype = getattr(torch, options.dtype)
    exported = export_megatron(
        checkpoint, options.output, dtype=dtype, layers=options.layers, tokenizer=tokenizer, progress=command.Progress()
    )
    if tokenizer is None and not options.no_tokenizer:
        print("no tokenizer: the run knew of none; --tokenizer PATH adds one")
    size = sum(path.stat().st_size for path in options.output.rglob("*") if path.is_file())
    print(
        f"{options.output}: {checkpoint.config.model.name} after step {checkpoint.step}, {exported.parameters:,} "
        f"parameters in {exported.tensors} tensors, {size / 2**20:,.1f} MiB in {time.monotonic() - began:.1f} s"
    )
    print(start_command(checkpoint, options.output, tokenizer is not None))


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
