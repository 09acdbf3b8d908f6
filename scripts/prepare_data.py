"""Make a training set and a validation set in Megatron's format from your own text.

    python scripts/prepare_data.py --format json --files 'corpus/*.jsonl' --output /data/web --tokenizer tokenizer.json
    python scripts/prepare_data.py --format parquet --files 'shards/**/*.parquet' --field content --output /data/web \\
        --tokenizer /data/tokenizer.json --train-tokenizer 32768
    python scripts/prepare_data.py --dataset NAME --split train --output /data/web --tokenizer tokenizer.json

Writes OUTPUT.bin, OUTPUT.idx and the same of OUTPUT_validation, and prints what to tell pretrain.py. Nothing is
overwritten, and nothing appears before all is done. See docs/data.md.

Exit codes: 0 done; 2 the input or the command is wrong, in one line on stderr.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import sys
from pathlib import Path

import datasets

from data.ingest import (
    FORMATS,
    TEXT_UNITS,
    Ingested,
    Part,
    find_files,
    ingest,
    open_files,
    open_hub,
    output_files,
    refuse_existing,
    train_on,
    validation_prefix,
)
from data.tokenizer import END_OF_DOCUMENT, TextTokenizer, load_tokenizer

# The embedding is padded to this, so that tensor-parallel ranks get equal shares in whole NVFP4 blocks.
_VOCABULARY_MULTIPLE = 128


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code: 0, or 2 with a line on stderr for what the user got wrong."""
    options = parse(arguments)
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # an error is told once, by us
    try:
        prepare(options)
    except (ValueError, OSError) as error:
        print(f"prepare_data.py: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--format", choices=FORMATS, help="of --files; json: one JSON object a line (also .gz, .bz2, .xz)")
    add("--files", nargs="+", metavar="PATTERN", help="paths, or quoted patterns: 'corpus/**/*.jsonl'")
    add("--dataset", metavar="NAME", help="instead of files: a dataset of the Hugging Face hub (needs a network)")
    add("--subset", metavar="NAME", help="of --dataset, where it has several")
    add("--split", help="of --dataset, e.g. train")
    add("--field", help="JSON field or column that holds the text (default text)")
    add("--text-unit", choices=TEXT_UNITS, help="what of a text file is a document (default: document, the whole file)")
    add("--output", required=True, type=Path, metavar="PREFIX", help="path of the new .bin and .idx, without ending")
    add("--tokenizer", required=True, type=Path, metavar="FILE", help="a tokenizer.json to use, or the one to train")
    add("--train-tokenizer", type=int, metavar="VOCAB", help="train a tokenizer of so many ids and save it there")
    add("--eod-token", metavar="TOKEN", help=f"the tokenizer's end-of-document token (default {END_OF_DOCUMENT})")
    add("--validation", type=float, default=0.01, metavar="SHARE", help="of documents to hold out (default 0.01)")
    add("--max-malformed", type=float, default=0.01, metavar="SHARE", help="of records skipped at most (default 0.01)")
    add("--workers", type=int, metavar="N", help="threads that tokenize (default: all cores); changes no byte")
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace) -> None:
    """Read, tokenize, write, print the summary and the overrides."""
    check_options(options)
    if options.workers is not None:
        # Read by the tokenizers' thread pool when it first has work.
        os.environ["RAYON_NUM_THREADS"] = str(options.workers)
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
    new_tokenizer = options.tokenizer if options.train_tokenizer is not None else None
    refuse_existing([*output_files(options.output), *([new_tokenizer] if new_tokenizer else [])])
    parts = open_parts(options)
    if options.train_tokenizer is None:
        tokenizer = load_tokenizer(options.tokenizer, options.eod_token or END_OF_DOCUMENT)
    else:
        tokenizer = train_on(parts, options.train_tokenizer, options.validation)
    done = ingest(
        parts,
        options.output,
        tokenizer,
        validation=options.validation,
        max_malformed=options.max_malformed,
        report=lambda line: print(line, file=sys.stderr, flush=True),
        new_tokenizer=new_tokenizer,
    )
    print(done.summary())
    if new_tokenizer is not None:
        print(f"{new_tokenizer}: a new tokenizer of {tokenizer.vocab_size:,} ids")
    words = [shlex.quote(word) for word in overrides(done, tokenizer, options.tokenizer)]
    print("\nTo train on it:\n\n  python pretrain.py", *words, sep=" \\\n    ")


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together, rather than ignore one."""
    if (options.files is None) == (options.dataset is None):
        raise ValueError("give the input as --files with --format, or as --dataset with --split: one of the two")
    if options.files is not None:
        needed, foreign = {"--format": options.format}, {"--subset": options.subset, "--split": options.split}
    else:
        needed, foreign = {"--split": options.split}, {"--format": options.format}
    source = "--files" if options.files is not None else "--dataset"
    for name, value in needed.items():
        if value is None:
            raise ValueError(f"{source} needs {name}")
    if options.format != "text":
        foreign["--text-unit"] = options.text_unit
    else:
        foreign["--field"] = options.field
    if options.train_tokenizer is not None:
        foreign["--eod-token"] = options.eod_token
    for name, value in foreign.items():
        if value is not None:
            with_what = {"--eod-token": "--train-tokenizer", "--field": "--format text"}.get(name, source)
            raise ValueError(f"{name} {value} has no effect with {with_what}; leave it out")
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers {options.workers} is no number of threads; give 1 or more")


def open_parts(options: argparse.Namespace) -> list[Part]:
    """The input, not yet read."""
    field = options.field or "text"
    if options.dataset is not None:
        return open_hub(options.dataset, options.split, field, options.subset)
    return open_files(options.format, find_files(options.files), field, options.text_unit or "document")


def overrides(done: Ingested, tokenizer: TextTokenizer, tokenizer_path: Path) -> list[str]:
    """What pretrain.py needs to train on the data, as Hydra overrides; paths are absolute."""
    name = re.sub(r"\W", "_", done.output.name, flags=re.ASCII)
    name = name if name.isidentifier() else f"source_{name}"
    held_out = [f"data.validation={{{name}: {_quoted(validation_prefix(done.output).resolve())}}}"]
    vocab_size = -(-tokenizer.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return [
        "data=indexed",
        f"data.sources={{{name}: {_quoted(done.output.resolve())}}}",
        *(held_out if done.validation.documents else []),
        f"data.tokenizer={_quoted(tokenizer_path.resolve())}",
        *([f"data.eod_token={_quoted(tokenizer.eod_token)}"] if tokenizer.eod_token != END_OF_DOCUMENT else []),
        f"data.phases=[{{name: main, fraction: 1.0, blend: {{{name}: 1.0}}}}]",
        f"model.vocab_size={vocab_size}",
        f"run.dir=runs/{name}",
    ]


def _quoted(value: object) -> str:
    """A value as Hydra reads it back, quoted where a character would mean something to its grammar."""
    text = str(value)
    return text if re.fullmatch(r"[A-Za-z0-9_./-]+", text) else "'" + text.replace("'", "\\'") + "'"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
