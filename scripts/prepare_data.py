"""Make a training set and a validation set in Megatron's format from your own text.

    python scripts/prepare_data.py --format json --files 'corpus/*.jsonl.zst' --output /data/web --tokenizer bpe.json
    python scripts/prepare_data.py --format parquet --files 'shards/**/*.parquet' --field content --output /data/web \\
        --tokenizer /data/tokenizer.json --train-tokenizer 32768
    python scripts/prepare_data.py --dataset NAME --split 'train[:1%]' --output /data/web --tokenizer tokenizer.json

Writes OUTPUT.bin, OUTPUT.idx, OUTPUT.json and the same of OUTPUT_validation, and prints what to tell pretrain.py.
Nothing is overwritten, and nothing appears before all is done. Until then it is in OUTPUT.parts: the same command again
goes on behind what was done, whatever ended it. See docs/data.md.

Exit codes: 0 done; 1 a process that tokenizes was killed; 2 the input or the command is wrong; 130 interrupted. Each
but 0 is told in one line on stderr.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.prepare.prepare import (
    Ingested,
    NewTokenizer,
    Options,
    PrepareProgress,
    ingest,
    validation_prefix,
    work_path,
)
from data.prepare.readers import (
    FORMATS,
    POLICIES,
    TEXT_UNITS,
    Part,
    find_files,
    is_saved_folder,
    open_dataset,
    open_files,
)
from data.prepare.tokenize import WorkerDied
from data.tokenizer import END_OF_DOCUMENT, KINDS, PREFIX, load_tokenizer
from megatron_fp4.runtime.closed_pipe import end_without_reader

# The embedding is padded to this, so that tensor-parallel ranks get equal shares in whole NVFP4 blocks.
_VOCABULARY_MULTIPLE = 128
_FROM_TOKENIZER = "the tokenizer's own"


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code, with a line on stderr if it is not 0."""
    options = parse(arguments)
    try:
        prepare(options)
    except (ValueError, OSError, WorkerDied) as error:
        return _failed(options, " ".join(str(error).split()), 1 if isinstance(error, WorkerDied) else 2)
    except KeyboardInterrupt:
        return _failed(options, "interrupted", 130)
    return 0


def _failed(options: argparse.Namespace, reason: str, code: int) -> int:
    work = work_path(options.output)
    going_on = f"; what is done is kept in {work}, the same command goes on behind it"
    kept = going_on if (work / "state.json").is_file() and str(work) not in reason else ""
    print(f"prepare_data.py: {reason}{kept}", file=sys.stderr, flush=True)
    return code


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--format", choices=FORMATS, help="of --files; json: one JSON object a line; json and text also compressed")
    add("--files", nargs="+", metavar="PATTERN", help="paths, or quoted patterns: 'corpus/**/*.jsonl'")
    add("--dataset", metavar="NAME", help="instead of files: a save_to_disk folder, or a name of the Hugging Face hub")
    add("--subset", metavar="NAME", help="of --dataset, where it has several")
    add("--split", help="of --dataset: train, or a slice such as train[:1%%]")
    add("--field", help="JSON field or column that holds the text (default text)")
    add("--text-unit", choices=TEXT_UNITS, help="what of a text file is a document (default: document, the whole file)")
    add("--output", required=True, type=Path, metavar="PREFIX", help="path of the new .bin and .idx, without ending")
    add("--tokenizer", required=True, metavar="FILE", help=f"{KINDS}; or the tokenizer.json to train")
    add("--train-tokenizer", type=int, metavar="VOCAB", help="train a tokenizer of so many ids and save it there")
    add("--eod-token", metavar="TOKEN", help="ends every document (default: what the tokenizer says)")
    add("--no-eod", action="store_true", help="end no document with a token")
    add("--bos", nargs="?", const=_FROM_TOKENIZER, metavar="TOKEN", help="begin every document with TOKEN, by default "
        "what the tokenizer says")  # fmt: skip
    add("--validation", type=float, default=0.01, metavar="SHARE", help="of documents to hold out (default 0.01)")
    add("--max-malformed", type=float, default=0.01, metavar="SHARE", help="of records skipped at most (default 0.01)")
    add(
        "--max-document-bytes", type=int, default=16 << 20, metavar="N", help="of text; larger is huge (default 16 MiB)"
    )
    add("--huge", choices=POLICIES, default="split", help="what becomes of a huge document (default: split)")
    add("--workers", type=int, metavar="N", help="processes that tokenize (default: all cores); changes no byte")
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace) -> None:
    """Read, tokenize, write, print the summary and the overrides."""
    check_options(options)
    shape = Options(
        validation=options.validation,
        max_malformed=options.max_malformed,
        max_document_bytes=options.max_document_bytes,
        huge=options.huge,
        eod=not options.no_eod,
    )
    parts = open_parts(options)
    tokenizer: Any = None
    bos = options.bos
    if options.train_tokenizer is not None:
        tokenizer = NewTokenizer(options.train_tokenizer, Path(options.tokenizer))
    else:
        tokenizer = load_tokenizer(options.tokenizer, options.eod_token)
        if bos == _FROM_TOKENIZER:
            bos = tokenizer.bos_token
    if bos == _FROM_TOKENIZER or (options.bos is not None and bos is None):
        raise ValueError(f"the tokenizer {options.tokenizer} does not say what begins a document; name it: --bos TOKEN")
    if bos is not None and options.train_tokenizer is None:
        tokenizer.id_of(bos)
    names = ("format", "dataset", "subset", "split", "field", "text_unit")
    source = {name: value for name in names if (value := getattr(options, name)) is not None}
    with PrepareProgress(sys.stderr) as progress:
        done = ingest(
            parts,
            options.output,
            tokenizer,
            replace(shape, bos_token=bos),
            source=source,
            workers=options.workers or len(os.sched_getaffinity(0)),
            report=progress.line,
            progress=progress,
        )
    print(done.summary())
    if options.train_tokenizer is not None:
        print(f"{options.tokenizer}: a new tokenizer of {done.tokenizer.vocab_size:,} ids")
    words = [shlex.quote(word) for word in overrides(done, options.tokenizer, options.eod_token)]
    print("\nTo train on it:\n\n  python pretrain.py", *words, sep=" \\\n    ")


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together, rather than ignore one."""
    if (options.files is None) == (options.dataset is None):
        raise ValueError("give the input as --files with --format, or as --dataset with --split: one of the two")
    if options.files is not None:
        needed, foreign = {"--format": options.format}, {"--subset": options.subset, "--split": options.split}
    else:
        needed, foreign = {"--split": options.split}, {"--format": options.format}
        if is_saved_folder(options.dataset):
            needed = {}
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
    if options.train_tokenizer is not None:
        if options.tokenizer.startswith(PREFIX) or Path(options.tokenizer).is_dir():
            raise ValueError(f"--tokenizer {options.tokenizer} is no file that a new tokenizer can be saved as")
        if options.bos not in (None, END_OF_DOCUMENT):
            raise ValueError(f"a tokenizer that --train-tokenizer makes has no token for --bos but {END_OF_DOCUMENT}")
    if options.no_eod and options.eod_token is not None:
        raise ValueError(f"--eod-token {options.eod_token} has no effect with --no-eod; leave one out")
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers {options.workers} is no number of processes; give 1 or more")


def open_parts(options: argparse.Namespace) -> list[Part]:
    """The input, not yet read."""
    field = options.field or "text"
    if options.dataset is not None:
        return open_dataset(options.dataset, options.split, field, options.subset)
    return open_files(options.format, find_files(options.files), field, options.text_unit or "document")


def overrides(done: Ingested, tokenizer: str, eod_token: str | None) -> list[str]:
    """What pretrain.py needs to train on the data, as Hydra overrides; paths are absolute."""
    name = re.sub(r"\W", "_", done.output.name, flags=re.ASCII)
    name = name if name.isidentifier() else f"source_{name}"
    held_out = [f"data.validation={{{name}: {_quoted(validation_prefix(done.output).resolve())}}}"]
    vocab_size = -(-done.tokenizer.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    where = tokenizer if tokenizer.startswith(PREFIX) else Path(tokenizer).resolve()
    return [
        "data=indexed",
        f"data.sources={{{name}: {_quoted(done.output.resolve())}}}",
        *(held_out if done.validation.documents else []),
        f"data.tokenizer={_quoted(where)}",
        *([f"data.eod_token={_quoted(eod_token)}"] if eod_token is not None else []),
        f"data.phases=[{{name: main, fraction: 1.0, blend: {{{name}: 1.0}}}}]",
        f"model.vocab_size={vocab_size}",
        f"run.dir=runs/{name}",
    ]


def _quoted(value: object) -> str:
    """A value as Hydra reads it back, quoted where a character would mean something to its grammar."""
    text = str(value)
    return text if re.fullmatch(r"[A-Za-z0-9_./-]+", text) else "'" + text.replace("'", "\\'") + "'"


if __name__ == "__main__":
    end_without_reader()
    # As Ctrl-C: what is done is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
