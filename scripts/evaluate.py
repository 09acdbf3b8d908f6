"""Examine models by tasks, side by side; or compare a run's validation losses with its exported model's.

    python scripts/evaluate.py runs/bf16 runs/nvfp4                  by tasks made from the builtin corpus, no network
    python scripts/evaluate.py BF16=exports/a NVFP4=exports/b --tasks hellaswag,arc_easy --json scores.json
    python scripts/evaluate.py exports/a --tasks my_task --include-path my_tasks
    python scripts/evaluate.py --validation runs/nvfp4               the framework and transformers on the same windows
    python scripts/evaluate.py --validation runs/nvfp4 exports/b     the same with a folder that is already there

A MODEL is a Hugging Face folder, or a checkpoint or run of ours (its newest checkpoint), which is exported into a
temporary folder first, in FP32 unless --dtype says otherwise. NAME=MODEL names it in the table; the first is what the
others are compared with. Tasks are lm-eval's: names, groups, tags and patterns, separated by commas, or task files. The
tasks of ours and those that read local files use no network.

With --validation the windows of all held-out sets of the run are scored in FP32 by the framework, from the checkpoint,
and by transformers, from each MODEL (if none is given, from an FP32 export). A folder with the FP32 weights has to
agree to 1e-5 nats; of others the distance is shown.

Exit codes: 0 done; 2 wrong arguments, models or tasks; 4 an FP32 folder's losses are not the framework's.
Needs pip install "megatron_fp4[eval]".
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from exchange.checkpoint import open_checkpoint
from inference.agreement import (
    TOLERANCE,
    Losses,
    agreement_table,
    folder_losses,
    framework_losses,
    open_windows,
    recorded_losses,
)
from inference.models import (
    DTYPES,
    Model,
    as_folder,
    device_named,
    in_one_line,
    models_of,
    open_folder,
    tokenizers_of,
)
from inference.tasks import load_tasks, prepare_environment
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.logging.files import replace_file
from megatron_fp4.logging.metrics import finite
from megatron_fp4.runtime.errors import run_command
from pretrain import CONFIGS

# Options of one of the two ways to use the script.
_OF_TASKS = ("tasks", "include_path", "num_fewshot", "limit", "batch_size", "max_length", "dtype", "tokenizer")
_OF_VALIDATION = ("set", "trust_config")


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    command = tasks if options.validation is None else validation
    try:
        return run_command("evaluate.py", lambda: command(options, arguments), options.json)
    except RuntimeError as error:
        # A CPU that has too little has no type of its own.
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        print(f"evaluate.py: {in_one_line(error, 120)}; give --batch-size, or another --device", file=sys.stderr)
        return 2


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help="folder, checkpoint or run; NAME=MODEL names it")
    add("--tasks", help="separated by commas (default: builtin, all that are shipped)")
    add("--include-path", type=Path, metavar="FOLDER", help="task files of your own")
    add("--num-fewshot", type=at_least(0), metavar="N", help="examples before each document")
    add("--limit", type=at_least(1), metavar="N", help="the first N documents of each task, for a try")
    add("--batch-size", type=at_least(1), metavar="N", help="rows of a batch (default: by their length)")
    add("--max-length", type=at_least(2), metavar="N", help="tokens of a window (default: the model's)")
    add("--dtype", choices=DTYPES, help="of the computation (default: auto, as the folder says)")
    add("--tokenizer", help="of the checkpoints, where it is now, if not where their runs had it")
    add("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--validation", type=Path, metavar="CHECKPOINT", help="score the validation windows of its run")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="with --validation: changes of data.*")
    add("--trust-config", action="store_true", help="the run is yours: use its paths and environment")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args(arguments)
    without = options.validation is None
    for name in _OF_VALIDATION if without else _OF_TASKS:
        if getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} does nothing {'without' if without else 'with'} --validation")
    if not options.models and without:
        parser.error("name a MODEL: an exported folder, a checkpoint or a run")
    if (path := options.json) is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        parser.error(f"--json {path} is no file in a folder that is there")
    return options


def at_least(minimum: int) -> Callable[[str], int]:
    """The type of an option that is a whole number."""

    def number(text: str) -> int:
        if not text.isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {minimum} or more")
        return int(text)

    return number


def tasks(options: argparse.Namespace, arguments: list[str]) -> int:
    """lm-eval's tasks on every model, one after the other; the table."""
    names = (options.tasks or "builtin").split(",")
    models, device = models_of(options.models, CONFIGS), device_named(options.device)
    prepare_environment(names)
    tokenizers = tokenizers_of(models, options.tokenizer)
    chosen = names, options.include_path, options.num_fewshot
    load_tasks(*chosen)  # refused before anything that takes long
    # After the environment, which lm-eval's libraries read when they are imported.
    from inference.evaluation import evaluation_table, examine, record

    dtype, examined = options.dtype or "auto", []
    settings = {name: getattr(options, name) for name in _OF_TASKS} | {"device": device}
    try:
        for model in models:
            stored = "float32" if dtype == "auto" else dtype
            with as_folder(model, stored, tokenizers.get(model.name)) as folder:
                found = examine(
                    model,
                    open_folder(folder, device, dtype),
                    # Anew, so that every model is shown the same examples: drawing them continues where it was.
                    load_tasks(*chosen),
                    limit=options.limit,
                    batch_rows=options.batch_size,
                    max_length=options.max_length,
                )
            examined.append(found)
            _free()
    finally:  # what took hours is not lost with the next model
        if examined:
            print(evaluation_table(examined), flush=True)
            write(options.json, record(examined, ["evaluate.py", *arguments], settings))
    return 0


def validation(options: argparse.Namespace, arguments: list[str]) -> int:
    """The run's windows, by the framework and by transformers; the table."""
    checkpoint, device = open_checkpoint(options.validation, CONFIGS), device_named(options.device)
    models = models_of(options.models, CONFIGS) or [Model("FP32 export", checkpoint.folder, checkpoint)]
    prepare_environment([])
    torch.backends.cudnn.allow_tf32 = False  # FP32 is to be FP32, in convolutions too
    if wrong := [text for text in options.set if not text.startswith("data.")]:
        raise ValueError(f"--set {wrong[0]} is not about data; it takes data.KEY=VALUE")
    saved, trusted = checkpoint.trainer["config"], options.trust_config
    windows = open_windows(config_from_saved(saved, options.set, CONFIGS, trusted=trusted))
    nats: dict[str, Losses] = {}
    if not options.set and (recorded := recorded_losses(checkpoint)):
        nats["recorded by the run"] = recorded
    reference = "framework, FP32"
    nats[reference] = framework_losses(checkpoint, windows, device)
    _free()
    apart: dict[str, float] = {}  # of folders with the checkpoint's weights to the last bit, which have to agree
    for model in models:
        with as_folder(model, "float32") as folder:
            opened = open_folder(folder, device, "float32", with_tokenizer=False)
            exact = opened.stored == "float32"
            title = f"transformers, FP32: {model.name}{'' if exact else f' (stored in {opened.stored})'}"
            nats[title] = folder_losses(opened, windows)
            if exact:
                distances = [nats[title][name] - loss for name, loss in nats[reference].items()]
                apart[title] = torch.tensor(distances, dtype=torch.float64).abs().max().item()  # NaN if one is
            del opened
        _free()
    targets = sum(yardstick.targets for yardstick in windows.yardsticks.values())
    print(f"step {checkpoint.step} of {checkpoint.folder}: {targets:,} targets")
    print(f"\n{agreement_table(windows, nats, reference)}")
    agrees = all(distance <= TOLERANCE for distance in apart.values())
    for title, distance in apart.items():
        if not distance <= TOLERANCE:
            print(f"\nDIFFERS: {title} is {distance:.1e} nats from the framework, not {TOLERANCE}")
    if agrees and apart:
        print(f"\nframework and transformers agree to {TOLERANCE:.0e} nats")
    content = {
        "command": ["evaluate.py", *arguments],
        "step": checkpoint.step,
        "checkpoint": str(checkpoint.folder),
        "nats": nats,
        "bits_per_byte": {
            title: {name: windows.yardsticks[name].bits_per_byte(loss) for name, loss in by_set.items()}
            for title, by_set in nats.items()
        },
        "agrees": agrees,
    }
    write(options.json, content)
    return 0 if agrees else 4


def write(path: Path | None, content: dict[str, Any]) -> None:
    """Write JSON, whole or not at all; nothing without a path."""
    if path is not None:
        text = json.dumps(finite(content), indent=1, default=str, allow_nan=False) + "\n"
        replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _free() -> None:
    """Give back the memory of the last model, before the next takes its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
