"""Evaluate models on tasks, or compare the validation losses of a run with those of its exported model.

    python scripts/evaluate.py runs/bf16 runs/nvfp4                  tasks from the built-in corpus, without a network
    python scripts/evaluate.py BF16=exports/a NVFP4=exports/b --tasks hellaswag,arc_easy --json scores.json
    python scripts/evaluate.py exports/a --tasks my_task --include-path my_tasks
    python scripts/evaluate.py --validation runs/nvfp4               the framework and transformers on the same windows
    python scripts/evaluate.py --validation runs/nvfp4 exports/b     the same with an existing export

A MODEL is a Hugging Face folder, or a checkpoint or run of this framework. These are first exported into a temporary
folder, in FP32 unless --dtype is given. NAME=MODEL names it in the table; the others are compared with the first one.
Tasks are lm-eval's: names, groups, tags and patterns, separated by commas, or task files. Our tasks and tasks with
local files use no network.

With --validation all held-out windows of the run are scored in FP32 by the framework, from the checkpoint, and by
transformers, from each MODEL (default: an FP32 export). A folder with the FP32 weights must agree to 1e-5 nats; for
others the difference is shown.

Exit codes: 0 done; 2 wrong arguments, models or tasks; 4 the losses of an FP32 folder differ from the framework's.
Needs pip install -e ".[eval]".
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
from inference import agreement
from inference.models import DTYPES, Model, as_folder, device_named, models_of, open_folder, tokenizers_of
from inference.tasks import load_tasks, prepare_environment
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.logging.files import replace_text
from megatron_fp4.logging.metrics import finite
from megatron_fp4.runtime.errors import run_command
from pretrain import CONFIGS

# Options without --validation, and options with it.
_OF_TASKS = ("tasks", "include_path", "num_fewshot", "limit", "batch_size", "max_length", "dtype", "tokenizer")
_OF_VALIDATION = ("set",)


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(arguments)
    command = tasks if options.validation is None else validation
    remedy = "lower --batch-size, or use another --device"
    return run_command("evaluate.py", lambda: command(options, arguments), options.json, less_memory=remedy)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help="folder, checkpoint or run; NAME=MODEL names it")
    add("--tasks", help="separated by commas (default: builtin, which is all shipped tasks)")
    add("--include-path", type=Path, metavar="FOLDER", help="folder with your own task files")
    add("--num-fewshot", type=at_least(0), metavar="N", help="examples before each document")
    add("--limit", type=at_least(1), metavar="N", help="use only the first N documents of each task")
    add("--batch-size", type=at_least(1), metavar="N", help="rows of a batch (default 8)")
    add("--max-length", type=at_least(2), metavar="N", help="tokens of a window (default: the model's)")
    add("--dtype", choices=DTYPES, help="of the computation (default: auto, the folder's)")
    add("--tokenizer", help="path of the checkpoints' tokenizer, if it was moved")
    add("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--validation", type=Path, metavar="CHECKPOINT", help="score the validation windows of its run")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="with --validation: changes of data.*")
    add("--trust-config", action="store_true", help="the run is yours: use its paths and environment")
    add("--json", type=Path, metavar="FILE", help="also write all results to this file")
    options = parser.parse_args(arguments)
    without = options.validation is None
    for name in _OF_VALIDATION if without else _OF_TASKS:
        if getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} has no effect {'without' if without else 'with'} --validation")
    if not options.models and without:
        parser.error("name a MODEL: an exported folder, a checkpoint or a run")
    if (path := options.json) is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        parser.error(f"--json {path} is not a file in an existing folder")
    return options


def at_least(minimum: int) -> Callable[[str], int]:
    """The argparse type of an integer option."""

    def number(text: str) -> int:
        if not text.isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {minimum} or more")
        return int(text)

    return number


def tasks(options: argparse.Namespace, arguments: list[str]) -> int:
    """Evaluate every model on the tasks of lm-eval, and print the table."""
    names = (options.tasks or "builtin").split(",")
    models, device = models_of(options.models, CONFIGS, options.trust_config), device_named(options.device)
    prepare_environment(names)
    tokenizers = tokenizers_of(models, options.tokenizer)
    chosen = names, options.include_path, options.num_fewshot
    load_tasks(*chosen)  # fails before anything that takes long
    # After `prepare_environment`, because lm-eval's libraries read the environment when they are imported.
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
                    # Load the tasks again, so that their random generator starts again and gives the same examples.
                    load_tasks(*chosen),
                    limit=options.limit,
                    batch_rows=options.batch_size,
                    max_length=options.max_length,
                )
            examined.append(found)
            _free()
    finally:  # an error with one model must not lose the results of the others
        if examined:
            print(evaluation_table(examined), flush=True)
            write(options.json, record(examined, ["evaluate.py", *arguments], settings))
    return 0


def validation(options: argparse.Namespace, arguments: list[str]) -> int:
    """Score the run's windows with the framework and with transformers, and print the table."""
    checkpoint, device = open_checkpoint(options.validation, CONFIGS), device_named(options.device)
    models = models_of(options.models, CONFIGS, options.trust_config)
    models = models or [Model("FP32 export", checkpoint.folder, checkpoint)]
    prepare_environment([])
    torch.backends.cudnn.allow_tf32 = False  # compute convolutions in real FP32
    if wrong := [text for text in options.set if not text.startswith("data.")]:
        raise ValueError(f"--set {wrong[0]} is not about data; it takes data.KEY=VALUE")
    saved, trusted = checkpoint.trainer["config"], options.trust_config
    windows = agreement.open_windows(config_from_saved(saved, options.set, CONFIGS, trusted=trusted))
    nats: dict[str, agreement.Losses] = {}
    if not options.set and (recorded := agreement.recorded_losses(checkpoint)):
        nats["recorded by the run"] = recorded
    reference = "framework, FP32"
    nats[reference] = agreement.framework_losses(checkpoint, windows, device)
    _free()
    apart: dict[str, float] = {}  # the largest difference of each folder in FP32; these must agree
    for model in models:
        with as_folder(model, "float32") as folder:
            opened = open_folder(folder, device, "float32", with_tokenizer=False)
            exact = opened.stored == "float32"
            title = f"transformers, FP32: {model.name}{'' if exact else f' (stored in {opened.stored})'}"
            nats[title] = agreement.folder_losses(opened, windows)
            if exact:
                distances = [nats[title][name] - loss for name, loss in nats[reference].items()]
                apart[title] = torch.tensor(distances, dtype=torch.float64).abs().max().item()  # NaN if one is
            del opened
        _free()
    targets = sum(of_set.targets for of_set in windows.statistics.values())
    print(f"step {checkpoint.step} of {checkpoint.folder}: {targets:,} targets")
    print(f"\n{agreement.agreement_table(windows, nats, reference)}")
    agrees = all(distance <= agreement.TOLERANCE for distance in apart.values())
    for title, distance in apart.items():
        if not distance <= agreement.TOLERANCE:
            print(f"\nDIFFERS: {title} is {distance:.1e} nats from the framework, not {agreement.TOLERANCE}")
    if agrees and apart:
        print(f"\nframework and transformers agree to {agreement.TOLERANCE:.0e} nats")
    content = {
        "command": ["evaluate.py", *arguments],
        "step": checkpoint.step,
        "checkpoint": str(checkpoint.folder),
        "nats": nats,
        "bits_per_byte": {
            title: {name: windows.statistics[name].bits_per_byte(loss) for name, loss in by_set.items()}
            for title, by_set in nats.items()
        },
        "agrees": agrees,
    }
    write(options.json, content)
    return 0 if agrees else 4


def write(path: Path | None, content: dict[str, Any]) -> None:
    """Write JSON atomically; do nothing without a path."""
    if path is not None:
        replace_text(path, json.dumps(finite(content), indent=1, default=str, allow_nan=False) + "\n")


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
