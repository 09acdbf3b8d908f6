"""Make a checkpoint of a Hugging Face folder, from which a run begins.

    python scripts/import_hf.py exported/8b checkpoints/8b
    torchrun ... pretrain.py ... checkpoint.initialize_from=checkpoints/8b data.tokenizer=checkpoints/8b

`nemotron_h` (with `-`, `M` and `*` blocks) and `arcee` folders in safetensors. Weights become FP32 masters, exactly;
the tokenizer and the other small files are kept in the checkpoint. The model's settings are printed, and written as
CHECKPOINT.yaml, to be a file of configs/model. CHECKPOINT appears when it is whole.
Exit code: 0 written, 2 refused, with one line on stderr.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from exchange.hf.importing import import_hf
from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.runtime.closed_pipe import end_without_reader
from pretrain import CONFIGS
from scripts.export.command import import_and_describe


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the model")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint to write, which must not exist")
    parser.add_argument("--name", help="model.name of it (default: the folder's name)")
    options = parser.parse_args(arguments)
    try:
        import_and_describe(
            options.checkpoint, lambda: import_hf(options.folder, options.checkpoint, CONFIGS, name=options.name)
        )
    except (ValueError, OSError, DamagedCheckpointError) as error:
        print(f"import_hf.py: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
