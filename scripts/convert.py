"""Checkpoints out of and into the formats of others.

    python scripts/convert.py export-hf runs/8b exported/8b                   the newest checkpoint of a run, in BF16
    python scripts/convert.py export-hf runs/8b/checkpoints/step_00002000 exported/8b --format nvfp4
    python scripts/convert.py check exported/8b runs/8b                       bit for bit what the checkpoint trained
    python scripts/convert.py import-hf exported/8b checkpoints/8b            to begin a run from
    python scripts/convert.py export-megatron runs/8b exported/megatron_8b    what Megatron-LM loads
    python scripts/convert.py import-megatron /data/megatron/8b checkpoints/8b

`COMMAND --help` says what each does. What is written appears when it is whole.
Exit code: 0 done, 2 refused, with one line on stderr; of `check` 4 if something differs.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import os
import sys

if __name__ == "__main__" and "--beside" in sys.argv[1:-1]:
    # Before torch is imported, which takes seconds. A run starts this beside it (exchange/exports.py): at the lowest
    # priority, and ended by the kernel when the run ends, which may be killed without a chance to do it.
    import ctypes
    import signal

    at = sys.argv.index("--beside")
    parent = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG of linux/prctl.h
    if str(os.getppid()) != parent:  # it was gone before the line above
        os._exit(1)
    os.nice(19)

import argparse
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from data.tokenizer import TextTokenizer
from exchange.calibration import largest_inputs
from exchange.check import FolderCheck
from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.hf_export import export_hf
from exchange.hf_import import Folder, import_hf
from exchange.megatron import export_megatron, import_megatron, start_command
from exchange.nvfp4 import COMPRESSED_TENSORS, MODELOPT, trained_plan
from exchange.tokenizer import tokenizer_of
from exchange.weights_only import check_output
from inference.models import ProgressLine
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.runtime.errors import run_command
from megatron_fp4.training.build import plans_of
from models import provider as models
from pretrain import CONFIGS

FORMATS = {"nvfp4": MODELOPT, "nvfp4-compressed-tensors": COMPRESSED_TENSORS}
_DTYPES, _PLANS = ("bfloat16", "float32"), ("now", "before")


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    output = getattr(options, "output", options.checkpoint)
    return run_command(f"convert.py {options.command}", lambda: options.run(options), output)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    with_tokenizer = argparse.ArgumentParser(add_help=False)
    group = with_tokenizer.add_mutually_exclusive_group()
    group.add_argument("--tokenizer", help="where the run's tokenizer is now, if not where its configuration says")
    group.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer out")

    def command(name: str, run: Callable[[Any], int], *parents: argparse.ArgumentParser) -> Callable[..., Any]:
        text = inspect.getdoc(run) or ""
        title = text.splitlines()[0]
        added = commands.add_parser(name, help=title, description=text, formatter_class=style, parents=parents)
        added.set_defaults(run=run)
        return added.add_argument

    run = "folder of a checkpoint, or of a run: its newest one"
    add = command("export-hf", export_hf_command, with_tokenizer)
    add("checkpoint", type=Path, help=run)
    add("output", type=Path, help="the folder to write, which must not exist")
    add("--format", choices=("hf", *FORMATS), default="hf", help="NVFP4 in ModelOpt's or compressed-tensors' layout")
    add("--dtype", choices=_DTYPES, help="of the weights (default bfloat16)")
    add("--trust-config", action="store_true", help="the run is yours: use its paths and environment")
    add("--plan", choices=_PLANS, help="of NVFP4 after a precision switch; before: by the plan before it")
    add("--calibrate", type=int, metavar="N", help="of NVFP4: scales of inputs (W4A4), from N held-out sequences")

    add = command("export-megatron", export_megatron_command, with_tokenizer)
    add("checkpoint", type=Path, help=run)
    add("output", type=Path, help="the folder to write, which must not exist")
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights but A_log, D and dt_bias, always float32")

    for name, command_of in (("import-hf", import_hf_command), ("import-megatron", import_megatron_command)):
        add = command(name, command_of)
        add("folder", type=Path, help="folder of the model")
        add("checkpoint", type=Path, help="the checkpoint to write, which must not exist")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="what neither shapes nor arguments tell of it")
    add("--tokenizer", type=Path, help="folder or file, to be kept (default: the one of an export of ours)")

    add = command("check", check_command, with_tokenizer)
    add("folder", type=Path, help="the exported folder")
    add("checkpoint", type=Path, help=run)
    add("--plan", choices=_PLANS, default="now", help="as it was exported (export-hf --plan)")
    return parser.parse_args(arguments)


def export_hf_command(options: argparse.Namespace) -> int:
    """Write a Hugging Face folder: `AutoModelForCausalLM.from_pretrained` and serving engines load it.

    Hybrids become `nemotron_h`, Transformers with RoPE `arcee`. The checkpoint may be of any mesh; one process reads it
    tensor by tensor, after every file has been compared with its SHA-256.
    """
    for name in ("plan", "calibrate"):
        if options.format == "hf" and getattr(options, name) is not None:
            raise ValueError(f"--{name} is for NVFP4; add --format nvfp4, or leave it out")
    if options.format != "hf" and options.dtype is not None:
        raise ValueError(f"--dtype {options.dtype}: with --format {options.format} all else is bfloat16; leave it out")
    checkpoint, began = open_checkpoint(options.checkpoint, CONFIGS, options.trust_config), time.monotonic()
    check_output(options.output, checkpoint.folder)
    tokenizer, nvfp4 = _tokenizer(options, checkpoint), None
    if options.format != "hf":
        trained = trained_plan(checkpoint, plans_of(checkpoint.config, models), options.plan or "now")
        inputs = None
        if options.calibrate is not None:  # which opens the data that the checkpoint names
            config = config_from_saved(checkpoint.trainer["config"], [], CONFIGS, trusted=options.trust_config)
            inputs = largest_inputs(checkpoint, trained, config, options.calibrate)
        nvfp4 = FORMATS[options.format], trained, inputs
        for form in sorted({*trained.others().values()}):
            count = [*trained.others().values()].count(form)
            print(f"linears trained in {form}, which this format does not have: {count}, written in bfloat16")
    dtype, progress = getattr(torch, options.dtype or "bfloat16"), ProgressLine("elements written")
    export_hf(checkpoint, options.output, dtype=dtype, nvfp4=nvfp4, tokenizer=tokenizer, progress=progress)
    _say_written(options.output, checkpoint, began)
    return 0


def export_megatron_command(options: argparse.Namespace) -> int:
    """Write what Megatron-LM loads: Megatron-core's distributed checkpoint (`torch_dist`).

    A model of the pattern `*-*-...` becomes a GPTModel, any other a MambaModel. The checkpoint may be of any mesh, and
    Megatron loads the result on any mesh. OUTPUT gets the weights without optimizer state, the model as Megatron-LM's
    flags (megatron_args.sh), the run's tokenizer and a README.md.
    """
    checkpoint, began = open_checkpoint(options.checkpoint, CONFIGS), time.monotonic()
    check_output(options.output, checkpoint.folder)
    tokenizer = _tokenizer(options, checkpoint)
    checkpoint.verify()
    dtype, progress = getattr(torch, options.dtype), ProgressLine("elements written")
    export_megatron(checkpoint, options.output, dtype=dtype, tokenizer=tokenizer, progress=progress)
    _say_written(options.output, checkpoint, began)
    if dtype != torch.float32:
        print("the FP32 masters were rounded to bfloat16; --dtype float32 keeps them")
    print(start_command(checkpoint, options.output, tokenizer is not None))
    return 0


def import_hf_command(options: argparse.Namespace) -> int:
    """Make a checkpoint of a Hugging Face folder, from which a run begins.

        torchrun ... pretrain.py ... checkpoint.initialize_from=checkpoints/8b data.tokenizer=checkpoints/8b

    `nemotron_h` (with `-`, `M` and `*` blocks) and `arcee` folders in safetensors. Weights become FP32 masters,
    exactly; the tokenizer and the other small files are kept in the checkpoint. The model's settings are printed, and
    written as CHECKPOINT.yaml, to be a file of configs/model.
    """
    return _import(options, import_hf)


def import_megatron_command(options: argparse.Namespace) -> int:
    """Make a checkpoint, from which a run begins, of what Megatron-LM saved with `--ckpt-format torch_dist`.

    The folder is what `--save` named, or an iter_* folder in it, of any mesh: a GPTModel or a MambaModel with squared
    ReLU, RMSNorm, no biases, and an embedding and a head of their own. Its optimizer state is left out. The model is
    what shapes and the arguments in common.pt say; `--set model.key=value` adds what they do not, and
    `--set model.vocab_size=N` cuts the rows that Megatron padded with. Weights become FP32 masters, exactly. The
    model's settings are printed, and written as CHECKPOINT.yaml, to be a file of configs/model.
    """
    return _import(options, import_megatron, overrides=options.set, tokenizer=options.tokenizer)


def _import(options: argparse.Namespace, read: Callable[..., dict[str, Any]], **more: Any) -> int:
    described = options.checkpoint.with_name(f"{options.checkpoint.name}.yaml")
    if described.exists():
        raise ValueError(f"{described} exists already; name another checkpoint, or remove it")
    settings = read(options.folder, options.checkpoint, CONFIGS, **more)
    text = yaml.safe_dump(settings, sort_keys=False)
    described.write_text(text)
    print(f"{options.checkpoint}: {settings['name']}; its settings are in {described}:\n{text}", end="")
    return 0


def check_command(options: argparse.Namespace) -> int:
    """Compare an exported folder with the checkpoint that it was made from, bit for bit.

    Of a folder in plain types: every tensor, and the fields of config.json. Of one in NVFP4: also that codes and scales
    decode to what the GEMMs of training multiplied with, and that exactly the linears without codes are excluded. And
    the tokenizer, if the run has one. If something differs, the files of the checkpoint are compared with their SHA-256
    last. Exit code 4 if something differs.
    """
    folder, checkpoint = Folder(options.folder), open_checkpoint(options.checkpoint, CONFIGS)
    trained, weights = None, f"{folder.config.get('dtype')}"
    if folder.layout is not None:
        trained = trained_plan(checkpoint, plans_of(checkpoint.config, models), options.plan)
        weights = f"NVFP4 weights in the {folder.layout.name} layout"
    elif options.plan != "now":
        raise ValueError(f"--plan {options.plan}: {folder.path} has no NVFP4 weights; leave it out")
    tokenizer = _tokenizer(options, checkpoint)
    print(f"{folder.path}: {folder.config.get('model_type')}, {weights}, against {checkpoint.folder}", flush=True)
    differing = 0
    for finding in FolderCheck(folder, checkpoint, trained, tokenizer).findings():
        first, *more = finding.problems or [""]
        verdict = f"DIFFERS: {first}{f' (and {len(more)} more)' if more else ''}" if first else "equal"
        differing += bool(first)
        print(f"  {finding.what:<24}{finding.extent:<28}{verdict}", flush=True)
    if differing:
        checkpoint.verify()  # that it is not its files that are damaged
    return 4 if differing else 0


def _tokenizer(options: argparse.Namespace, checkpoint: Checkpoint) -> TextTokenizer | None:
    tokenizer = None if options.no_tokenizer else tokenizer_of(checkpoint, options.tokenizer)
    if tokenizer is None:
        print("no tokenizer" + ("" if options.no_tokenizer else ": the run knew of none; --tokenizer PATH adds one"))
    return tokenizer


def _say_written(output: Path, checkpoint: Checkpoint, began: float) -> None:
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(
        f"{output}: {checkpoint.config.model.name} after step {checkpoint.step}, {size / 2**20:,.1f} MiB in "
        f"{time.monotonic() - began:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
