"""Make a checkpoint to start a run from out of what Megatron-LM saved: Megatron-core's distributed checkpoint.

    python scripts/import_megatron.py /data/megatron/hybrid imports/hybrid
    python scripts/import_megatron.py /data/megatron/hybrid/iter_0010000 imports/hybrid --model nemotron_h_8b
    python scripts/import_megatron.py /data/megatron/gpt imports/gpt model.vocab_size=50257

FOLDER is what `--save` named, or an iter_* folder in it, of `--ckpt-format torch_dist` and of any mesh; it may have
optimizer state, which is not taken. The model is what shapes and the arguments in common.pt say: a GPTModel or a
MambaModel with squared ReLU, RMSNorm, no biases and separate embedding and head. Then
`python pretrain.py checkpoint.initialize_from=CHECKPOINT ...` starts from it. See docs/models_in_and_out.md.

Exit codes: 0 done; 2 FOLDER is damaged or holds another kind of model, or CHECKPOINT exists, in one line on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from exchange.megatron.importing import import_megatron

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="what Megatron-LM saved")
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="a folder that does not exist yet")
    add("overrides", nargs="*", metavar="model.key=value", help="what neither shapes nor arguments tell")
    add("--model", metavar="NAME", help="a config of configs/model that the weights have to fit")
    options = parser.parse_args(arguments)
    try:
        imported = import_megatron(
            options.folder, options.checkpoint, CONFIGS, model=options.model, overrides=options.overrides
        )
    except (ValueError, OSError) as error:
        print(f"import_megatron.py: {error}", file=sys.stderr)
        return 2
    model = imported.config.model
    print(f"{options.checkpoint}: {imported.parameters:,} parameters, pattern {model.pattern}")
    print(f"python pretrain.py checkpoint.initialize_from={options.checkpoint} ...")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
