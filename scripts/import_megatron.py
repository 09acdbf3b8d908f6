"""Make a checkpoint, from which a run begins, of what Megatron-LM saved: Megatron-core's distributed checkpoint.

    python scripts/import_megatron.py /data/megatron/8b checkpoints/8b
    python scripts/import_megatron.py /data/megatron/8b/iter_0010000 checkpoints/8b --model nemotron_h_8b
    python scripts/import_megatron.py /data/megatron/8b checkpoints/8b --tokenizer /data/tokenizer.json
    torchrun ... pretrain.py ... checkpoint.initialize_from=checkpoints/8b data.tokenizer=checkpoints/8b

The folder is what `--save` named, or an iter_* folder in it, of `--ckpt-format torch_dist` and of any mesh: a GPTModel
or a MambaModel with squared ReLU, RMSNorm, no biases, and an embedding and a head of their own. Its optimizer state is
left out. The model is what shapes and the arguments in common.pt say; `model.key=value` adds what they do not, and
`model.vocab_size=N` cuts the rows that Megatron padded with. Weights become FP32 masters, exactly. The model's settings
are printed, and written as CHECKPOINT.yaml, to be a file of configs/model. CHECKPOINT appears when it is whole.
Exit code: 0 written, 2 refused, with one line on stderr.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from exchange.megatron.importing import import_megatron
from megatron_fp4.runtime.closed_pipe import end_without_reader
from pretrain import CONFIGS
from scripts.export.command import import_and_describe


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what Megatron-LM saved")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint to write, which must not exist")
    parser.add_argument(
        "overrides", nargs="*", metavar="model.key=value", help="what neither shapes nor arguments tell"
    )
    parser.add_argument("--model", metavar="NAME", help="a config of configs/model that the weights have to fit")
    parser.add_argument("--name", help="model.name of it (default: the folder's name, or that of --model)")
    kept = "the model's tokenizer, a folder or a file, to be kept (default: the one of an export of ours)"
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help=kept)
    options = parser.parse_intermixed_args(arguments)
    try:
        import_and_describe(
            options.checkpoint,
            lambda: import_megatron(
                options.folder,
                options.checkpoint,
                CONFIGS,
                name=options.name,
                model=options.model,
                overrides=options.overrides,
                tokenizer=options.tokenizer,
            ),
        )
    except (ValueError, OSError) as error:
        print(f"import_megatron.py: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    end_without_reader()
    sys.exit(main(sys.argv[1:]))
