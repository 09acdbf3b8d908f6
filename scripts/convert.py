"""Convert checkpoints to and from other formats.

    python scripts/convert.py export-hf runs/8b exported/8b                   the newest checkpoint of a run, in BF16
    python scripts/convert.py export-hf runs/8b/checkpoints/step_00002000 exported/8b --format nvfp4
    python scripts/convert.py check exported/8b runs/8b                       compare with the checkpoint, bit for bit
    python scripts/convert.py import-hf exported/8b checkpoints/8b            a checkpoint to begin a run from
    python scripts/convert.py export-gguf runs/8b exported/8b.gguf            a file for llama.cpp
    python scripts/convert.py export-megatron runs/8b exported/megatron_8b    a checkpoint for Megatron-LM
    python scripts/convert.py import-megatron /data/megatron/8b checkpoints/8b

`COMMAND --help` explains each command. An output appears only when it is complete.
Exit code: 0 done; 2 refused, with one line on stderr; 4 if `check` finds a difference.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from data.indexed import document_tokens_text
from data.tokenizer import TextTokenizer
from exchange import gguf
from exchange.architectures import architecture_of, export_command
from exchange.check import FolderCheck
from exchange.checkpoint import Checkpoint, open_checkpoint
from exchange.hf_export import NVFP4Weights, export_hf
from exchange.hf_import import Folder, import_hf
from exchange.megatron import export_megatron, import_megatron, start_command
from exchange.nvfp4 import COMPRESSED_TENSORS, MODELOPT, TrainedPlan, largest_inputs, trained_plan
from exchange.tokenizer import tokenizer_of
from exchange.weights_only import check_output
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.config.errors import printable
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
    group.add_argument("--tokenizer", help="path of the run's tokenizer, if it was moved")
    group.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer out")
    trust = "the run is yours: use its paths and environment"
    with_tokenizer.add_argument("--trust-config", action="store_true", help=trust)

    def command(name: str, run: Callable[[Any], int], *parents: argparse.ArgumentParser) -> Callable[..., Any]:
        text = inspect.getdoc(run) or ""
        title = text.splitlines()[0]
        added = commands.add_parser(name, help=title, description=text, formatter_class=style, parents=parents)
        added.set_defaults(run=run)
        return added.add_argument

    run = "folder of a checkpoint, or of a run (its newest checkpoint)"
    add = command("export-hf", export_hf_command, with_tokenizer)
    add("checkpoint", type=Path, help=run)
    add("output", type=Path, help="the folder to write, which must not exist")
    add("--format", choices=("hf", *FORMATS), default="hf", help="NVFP4 in ModelOpt's or compressed-tensors' layout")
    add("--dtype", choices=_DTYPES, help="of the weights (default bfloat16)")
    add("--plan", choices=_PLANS, help="NVFP4 after a precision switch: use the plan now or before the switch")
    add("--calibrate", type=int, metavar="N", help="NVFP4: measure scales of inputs (W4A4) on N held-out sequences")

    add = command("export-gguf", export_gguf_command, with_tokenizer)
    add("checkpoint", type=Path, help=run)
    add("output", type=Path, help="the file to write, which must not exist")
    add("--format", choices=gguf.FORMATS, default="bf16", help="of the weights (default bf16)")
    add("--plan", choices=_PLANS, help="NVFP4 after a precision switch: use the plan now or before the switch")

    add = command("export-megatron", export_megatron_command, with_tokenizer)
    add("checkpoint", type=Path, help=run)
    add("output", type=Path, help="the folder to write, which must not exist")
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights, except A_log, D and dt_bias (float32)")

    for name, command_of in (("import-hf", import_hf_command), ("import-megatron", import_megatron_command)):
        add = command(name, command_of)
        add("folder", type=Path, help="folder of the model")
        add("checkpoint", type=Path, help="the checkpoint to write, which must not exist")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="settings that shapes and arguments lack")
    add("--tokenizer", type=Path, help="folder or file to save with it (default: the one in an export of ours)")

    add = command("check", check_command, with_tokenizer)
    add("folder", type=Path, help="the exported folder")
    add("checkpoint", type=Path, help=run)
    add("--plan", choices=_PLANS, default="now", help="the --plan with which it was exported")
    return parser.parse_args(arguments)


def export_hf_command(options: argparse.Namespace) -> int:
    """Write a Hugging Face folder for `AutoModelForCausalLM.from_pretrained` and serving engines.

    Hybrids become `nemotron_h`, Transformers with RoPE `arcee`, with gated FFNs `llama`. The checkpoint may be from any
    mesh. One process compares every file with its SHA-256, then reads the tensors one by one.
    """
    for name in ("plan", "calibrate"):
        if options.format == "hf" and getattr(options, name) is not None:
            raise ValueError(f"--{name} is for NVFP4; add --format nvfp4, or leave it out")
    if options.format != "hf" and options.dtype is not None:
        raise ValueError(f"--dtype {options.dtype}: with --format {options.format} the rest is bfloat16; leave it out")
    checkpoint, began = open_checkpoint(options.checkpoint, CONFIGS, options.trust_config), time.monotonic()
    check_output(options.output, checkpoint.folder)
    try:
        architecture_of(checkpoint.config.model)
    except ValueError as error:
        other = export_command(checkpoint.config.model)
        raise ValueError(f"{error}; use {other}" if other else str(error)) from error
    tokenizer, nvfp4 = _tokenizer(options, checkpoint), None
    if options.format != "hf":
        layout, inputs = FORMATS[options.format], None
        trained = _trained(options, checkpoint, layout.name)
        if options.calibrate is not None:  # opens the data of the checkpoint's run
            config = config_from_saved(checkpoint.trainer["config"], [], CONFIGS, trusted=options.trust_config)
            inputs = largest_inputs(checkpoint, trained, config, options.calibrate)
        nvfp4 = NVFP4Weights(layout, trained, inputs)
    dtype = getattr(torch, options.dtype or "bfloat16")
    export_hf(checkpoint, options.output, dtype=dtype, nvfp4=nvfp4, tokenizer=tokenizer)
    _print_written(options.output, checkpoint, tokenizer, began)
    return 0


def export_gguf_command(options: argparse.Namespace) -> int:
    """Write a GGUF file for llama.cpp, with the run's tokenizer.

    In NVFP4 it has the codes and scales that the model was trained with; linears without codes are bfloat16. llama.cpp
    computes hybrids and `llama` in NVFP4, `arcee` only in bfloat16 or float32.
    """
    if options.format != "nvfp4" and options.plan is not None:
        raise ValueError("--plan is for NVFP4; add --format nvfp4, or leave it out")
    checkpoint, began = open_checkpoint(options.checkpoint, CONFIGS, options.trust_config), time.monotonic()
    tokenizer = _tokenizer(options, checkpoint)
    trained = _trained(options, checkpoint, "modelopt") if options.format == "nvfp4" else None
    gguf.export_gguf(checkpoint, options.output, kind=options.format, trained=trained, tokenizer=tokenizer)
    _print_written(options.output, checkpoint, tokenizer, began)
    return 0


def export_megatron_command(options: argparse.Namespace) -> int:
    """Write a distributed checkpoint of Megatron-core (`torch_dist`) for Megatron-LM.

    A model with the pattern `*-*-...` becomes a GPTModel, any other a MambaModel. The checkpoint may be from any mesh,
    and Megatron loads the result on any mesh. OUTPUT gets the weights without optimizer state, the model as
    Megatron-LM's flags (megatron_args.sh), the run's tokenizer and a README.md.
    """
    checkpoint, began = open_checkpoint(options.checkpoint, CONFIGS, options.trust_config), time.monotonic()
    check_output(options.output, checkpoint.folder)
    tokenizer = _tokenizer(options, checkpoint)
    checkpoint.verify()
    dtype = getattr(torch, options.dtype)
    export_megatron(checkpoint, options.output, dtype=dtype, tokenizer=tokenizer)
    _print_written(options.output, checkpoint, tokenizer, began)
    if dtype != torch.float32:
        print("the FP32 masters were rounded to bfloat16; --dtype float32 writes them exactly")
    print(start_command(checkpoint, options.output, tokenizer is not None))
    return 0


def import_hf_command(options: argparse.Namespace) -> int:
    """Import a Hugging Face folder as a checkpoint, so that a run can begin from it.

        torchrun ... pretrain.py ... checkpoint.initialize_from=checkpoints/8b data.tokenizer=checkpoints/8b

    The folder must be a `nemotron_h` (with `-`, `M`, `*` and `E` blocks), an `arcee` or a `llama`, in safetensors.
    Weights are converted to FP32 masters exactly, and the tokenizer's files are saved in the checkpoint. The model's
    settings are printed and written to CHECKPOINT.yaml, which can be used as a file of configs/model.
    """
    return _import(options, import_hf)


def import_megatron_command(options: argparse.Namespace) -> int:
    """Import a checkpoint that Megatron-LM saved with `--ckpt-format torch_dist`, so that a run can begin from it.

    FOLDER is the folder of `--save`, or an iter_* folder in it, from any mesh. The model must be a GPTModel or a
    MambaModel with squared ReLU, RMSNorm, no biases, and separate embedding and head. Optimizer state is left out. The
    model's settings come from the shapes and from the arguments in common.pt; `--set model.key=value` adds missing
    ones, and `--set model.vocab_size=N` removes the rows with which Megatron padded the vocabulary. Weights are
    converted to FP32 masters exactly. The settings are printed and written to CHECKPOINT.yaml, which can be used as a
    file of configs/model.
    """
    return _import(options, import_megatron, overrides=options.set, tokenizer=options.tokenizer)


def _import(options: argparse.Namespace, read: Callable[..., dict[str, Any]], **more: Any) -> int:
    described = options.checkpoint.with_name(f"{options.checkpoint.name}.yaml")
    if described.exists():
        raise ValueError(f"{described} exists already; name another checkpoint, or remove it")
    settings = read(options.folder, options.checkpoint, CONFIGS, **more)
    text = yaml.safe_dump(settings, sort_keys=False)
    described.write_text(text)
    print(f"{options.checkpoint}: {printable(settings['name'])}; its settings are in {described}:\n{text}", end="")
    return 0


def check_command(options: argparse.Namespace) -> int:
    """Compare an exported folder with its checkpoint, bit for bit.

    Compares every tensor, the fields of config.json, and the tokenizer if the run has one. In NVFP4 also checks that
    codes and scales decode to the operands of the GEMMs in training, and that exactly the linears without codes are
    excluded. After a difference, the files of the checkpoint are compared with their SHA-256. Exit code 4 if something
    differs.
    """
    folder, checkpoint = Folder(options.folder), open_checkpoint(options.checkpoint, CONFIGS, options.trust_config)
    trained, weights = None, f"{folder.config.get('dtype')}"
    if folder.layout is not None:
        trained = trained_plan(checkpoint, plans_of(checkpoint.config, models), options.plan)
        weights = f"NVFP4 weights in the {folder.layout.name} layout"
    elif options.plan != "now":
        raise ValueError(f"--plan {options.plan}: {folder.path} has no NVFP4 weights; leave it out")
    tokenizer = _tokenizer(options, checkpoint)
    print(
        printable(f"{folder.path}: {folder.config.get('model_type')}, {weights}, against {checkpoint.folder}"),
        flush=True,
    )
    differing = 0
    for finding in FolderCheck(folder, checkpoint, trained, tokenizer).findings():
        first, *more = finding.problems or [""]
        verdict = f"DIFFERS: {first}{f' (and {len(more)} more)' if more else ''}" if first else "equal"
        differing += bool(first)
        print(printable(f"  {finding.what:<24}{finding.extent:<28}{verdict}"), flush=True)
    if differing:
        checkpoint.verify()  # the reason may be a damaged file
    return 4 if differing else 0


def _tokenizer(options: argparse.Namespace, checkpoint: Checkpoint) -> TextTokenizer | None:
    tokenizer = None if options.no_tokenizer else tokenizer_of(checkpoint, options.tokenizer)
    if tokenizer is None:
        print("no tokenizer" + ("" if options.no_tokenizer else ": the run has none; --tokenizer PATH adds one"))
    return tokenizer


def _trained(options: argparse.Namespace, checkpoint: Checkpoint, layout: str) -> TrainedPlan:
    trained = trained_plan(checkpoint, plans_of(checkpoint.config, models), options.plan or "now", layout)
    for form in sorted({*trained.other_formats().values()}):
        count = [*trained.other_formats().values()].count(form)
        print(f"linears trained in {form}, which this format does not have: {count}, written in bfloat16")
    return trained


def _print_written(output: Path, checkpoint: Checkpoint, tokenizer: TextTokenizer | None, began: float) -> None:
    size = sum(path.stat().st_size for path in (output, *output.rglob("*")) if path.is_file())
    print(
        f"{output}: {printable(checkpoint.config.model.name)} after step {checkpoint.step}, {size / 2**20:,.1f} MiB in "
        f"{time.monotonic() - began:.1f} s"
    )
    if tokenizer is not None:
        print(document_tokens_text(tokenizer.document_tokens))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
