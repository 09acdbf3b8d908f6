"""Compare an exported folder with the checkpoint that it was made from, bit for bit.

    python scripts/check_export.py exported/8b runs/8b/checkpoints/step_00002000
    python scripts/check_export.py exported/8b runs/8b                    the newest checkpoint of a run

Of a folder in plain types: every tensor, and the fields of config.json. Of one in NVFP4 (ModelOpt's layout or
compressed-tensors'): also that codes and scales decode to what the GEMMs of training multiplied with, that exactly the
linears without codes are excluded, and that q, k and v have one tensor scale. And the tokenizer, if the run has one.
If something differs, the files of the checkpoint are compared with their SHA-256 last.
Exit code: 0 all equal, 4 something differs, 2 wrong arguments or nothing to compare with.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from exchange.checkpoint import open_checkpoint
from exchange.folder_check import Folder, check_folder
from exchange.nvfp4 import PLANS, trained_plan
from exchange.tokenizer import tokenizer_of
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.runtime.closed_pipe import end_without_reader
from megatron_fp4.training.build import plans_of
from models import provider as models
from pretrain import CONFIGS


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    try:
        return 4 if compare(options) else 0
    except (ValueError, OSError, DamagedCheckpointError) as error:
        print(f"check_export.py: {error}", file=sys.stderr, flush=True)
        return 2


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the exported folder")
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run: its newest one")
    parser.add_argument("--plan", choices=PLANS, default="now", help="as it was exported (export_hf.py --plan)")
    parser.add_argument("--tokenizer", help="where the run's tokenizer is now, if not where its configuration says")
    parser.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer out of the comparison")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace) -> int:
    """Print a table; returns how many of its rows differ."""
    folder, checkpoint = Folder(options.folder), open_checkpoint(options.checkpoint, CONFIGS)
    if folder.layout is None and options.plan != "now":
        raise ValueError(f"--plan {options.plan}: {folder.path} has no NVFP4 weights; leave it out")
    trained = None
    if folder.layout is not None:
        trained = trained_plan(checkpoint, plans_of(checkpoint.config, models), options.plan)
    tokenizer = None if options.no_tokenizer else tokenizer_of(checkpoint, options.tokenizer)
    print(f"{folder.path}: {folder.title}, against {checkpoint.folder}", flush=True)
    differing = 0
    for finding in check_folder(folder, checkpoint, trained, tokenizer):
        verdict = f"DIFFERS: {finding.problem}" if finding.problem else "equal"
        differing += bool(finding.problem)
        print(f"  {finding.what:<24}{finding.extent:<28}{verdict}", flush=True)
    if differing:
        checkpoint.verify()  # that it is not its files that are damaged
    if tokenizer is None:
        print(f"  {'tokenizer':<24}{'':<28}not compared")
    return differing


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
