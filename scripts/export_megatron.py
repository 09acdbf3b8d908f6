"""Write a checkpoint as one that Megatron-LM loads: Megatron-core's distributed checkpoint (`torch_dist`).

    python scripts/export_megatron.py runs/default/checkpoints/step_00000300 exports/megatron
    python scripts/export_megatron.py runs/default exports/megatron --dtype float32

CHECKPOINT is a checkpoint or a run, whose newest one is taken. OUTPUT gets iter_*/, latest_checkpointed_iteration.txt,
megatron_args.sh (the model as Megatron-LM's flags) and a README.md. A model of the pattern `*-*-...` becomes a
GPTModel, any other a MambaModel. Optimizer state is not exported. Nothing is overwritten, and nothing appears before
all is done. See docs/models_in_and_out.md.

Exit codes: 0 done; 2 the checkpoint is damaged, the model is none of Megatron's, or OUTPUT exists, in one line on
stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from exchange.checkpoint import open_checkpoint
from exchange.megatron.arguments import SCRIPTS
from exchange.megatron.export import export_megatron
from exchange.megatron.names import model_class
from megatron_fp4.checkpoint.files import DamagedCheckpointError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run")
    add("output", type=Path, metavar="OUTPUT", help="a folder that does not exist yet")
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights (A_log, D and dt_bias are always FP32)")
    layers = "of a GPTModel: one tensor for all (stacked), or numbered, as with non_homogeneous_layers"
    add("--layers", choices=("stacked", "numbered"), default="stacked", help=layers)
    options = parser.parse_args(arguments)
    try:
        checkpoint = open_checkpoint(options.checkpoint, CONFIGS)
        checkpoint.verify()
        exported = export_megatron(checkpoint, options.output, dtype=_DTYPES[options.dtype], layers=options.layers)
    except (ValueError, OSError, DamagedCheckpointError) as error:
        print(f"export_megatron.py: {error}", file=sys.stderr)
        return 2
    script = SCRIPTS[model_class(checkpoint.config.model)]
    size = f"{exported.parameters:,} parameters in {exported.tensors} tensors, {exported.bytes / 2**30:.2f} GiB"
    print(f"{options.output}: step {checkpoint.step}, {size}")
    print(f"source {options.output}/megatron_args.sh")
    print(f'torchrun ... {script} "${{MEGATRON_ARGS[@]}}" --load {options.output} --finetune ...')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
