"""Tokenize your own text into a training set and a validation set in Megatron's format.

    python scripts/prepare_data.py --format json --files 'corpus/*.jsonl.zst' --output /data/web --tokenizer bpe.json
    python scripts/prepare_data.py --dataset 'shards/**/*.parquet' --field content --output /data/web \\
        --tokenizer /data/tokenizer.json --train-tokenizer 32768
    python scripts/prepare_data.py --dataset NAME --split 'train[:1%]' --output /data/web --tokenizer tokenizer.json
    python scripts/prepare_data.py merge --inputs /data/web_0 /data/web_1 '/data/more/*.idx' --output /data/web
    python scripts/prepare_data.py check '/data/web_*' list.yaml s3://bucket/code

Writes OUTPUT.bin, OUTPUT.idx, OUTPUT.json and the same for OUTPUT_validation, and prints the arguments for pretrain.py.
Nothing is overwritten. The outputs appear only when everything is done; until then the work is in OUTPUT.parts, and
after any interruption the same command resumes it. See docs/data.md.

Exit codes: 0 done; 1 a process that tokenizes was killed; 2 the input or the command is wrong; 130 interrupted. After
an error there is one line on stderr.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import argparse
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from data.prepare.merge import check_pair, merge
from data.prepare.prepare import NewTokenizer, Prepared, State, prefix_of, prepare, work_path
from data.prepare.readers import FORMATS, find_files, open_dataset, open_files
from data.prepare.tokenize import Options, WorkerDied
from data.sources import prefixes
from data.tokenizer import END_OF_DOCUMENT, KINDS, TextTokenizer, load_tokenizer

# The vocabulary is padded to a multiple of this, so that tensor-parallel ranks get equal shares in full NVFP4 blocks.
_VOCABULARY_MULTIPLE = 128


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Prints a line on stderr if it is not 0."""
    if arguments[:1] == ["merge"]:
        return _merge(arguments[1:])
    if arguments[:1] == ["check"]:
        return _check(arguments[1:])
    options = _parse(arguments)
    code = 2
    try:
        _prepare(options)
        return 0
    except WorkerDied as error:
        reason, code = str(error), 1
    except (ValueError, OSError) as error:
        reason = _error_line(error, options.output)
    except KeyboardInterrupt:
        reason, code = "interrupted", 130
    work = work_path(options.output)
    if (work / "state.json").is_file() and str(work) not in reason:
        reason += f"; the work so far is in {work}, and the same command resumes it"
    return _failed(reason, code)


def _failed(reason: str, code: int = 2, command: str = "") -> int:
    print(f"prepare_data.py{command}: {reason}", file=sys.stderr, flush=True)
    return code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--format", choices=FORMATS, help="of --files; json: one JSON object per line; both may be compressed")
    add("--files", nargs="+", metavar="PATTERN", help="paths, or quoted patterns: 'corpus/**/*.jsonl'")
    add("--dataset", nargs="+", metavar="NAME", help="instead of --files: data files and quoted patterns (Parquet, "
        "Arrow, JSON, CSV, text), a folder (save_to_disk, data files), or a name on the Hugging Face hub")  # fmt: skip
    add("--subset", metavar="NAME", help="of a folder or a name on the hub that has several")
    add("--split", help="of a folder or a name on the hub, there also a slice: train[:1%%]")
    add("--field", help="JSON field or column with the text; meta.text for a field inside meta (default text)")
    add("--output", required=True, type=Path, metavar="PREFIX", help="path of the new .bin and .idx, without ending")
    add("--tokenizer", required=True, metavar="FILE", help=f"{KINDS}; or the tokenizer.json to write")
    add("--train-tokenizer", type=int, metavar="VOCAB", help="train a tokenizer with VOCAB ids, saved as --tokenizer")
    add("--eod-token", metavar="TOKEN", help="ends every document (default: the tokenizer's)")
    add("--bos-token", metavar="TOKEN", help="begins every document (default: none)")
    add("--validation", type=float, default=0.01, metavar="SHARE", help="share of documents to hold out (default 0.01)")
    add("--max-malformed", type=float, default=0.01, metavar="SHARE", help="share of records to skip at most "
        "(default 0.01)")  # fmt: skip
    add("--max-document-bytes", type=int, default=16 << 20, metavar="N", help="of text; a larger document is split "
        "(default 16 MiB)")  # fmt: skip
    add("--workers", type=int, metavar="N", help="processes (default: all cores); does not change the output")
    return parser.parse_args(arguments)


def _check_options(options: argparse.Namespace) -> None:
    if (options.files is None) == (options.dataset is None):
        raise ValueError("give the input either as --files with --format, or as --dataset")
    if options.files is not None and options.format is None:
        raise ValueError("--files needs --format")
    trains = options.train_tokenizer is not None
    without_effect = [
        ("--subset", options.subset, options.files is not None, "--files"),
        ("--split", options.split, options.files is not None, "--files"),
        ("--format", options.format, options.dataset is not None, "--dataset"),
        ("--field", options.field, options.format == "text", "--format text"),
        ("--eod-token", options.eod_token, trains, "--train-tokenizer"),
    ]
    for name, value, is_so, with_what in without_effect:
        if value is not None and is_so:
            raise ValueError(f"{name} {value} has no effect with {with_what}; leave it out")
    if trains and Path(options.tokenizer).is_dir():
        raise ValueError(f"--tokenizer {options.tokenizer} is a folder; name the tokenizer.json to write")
    if trains and options.bos_token not in (None, END_OF_DOCUMENT):
        raise ValueError(f"--bos-token: a tokenizer of --train-tokenizer has only {END_OF_DOCUMENT}; name that one")
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers {options.workers}: give 1 or more")


def _prepare(options: argparse.Namespace) -> None:
    _check_options(options)
    tokenizer: TextTokenizer | NewTokenizer
    if options.train_tokenizer is not None:
        tokenizer = NewTokenizer(options.train_tokenizer, Path(options.tokenizer), options.bos_token)
    else:
        tokenizer = load_tokenizer(options.tokenizer, options.eod_token, options.bos_token)
    field = options.field or "text"
    if options.dataset is not None:
        parts = open_dataset(options.dataset, options.split, field, options.subset)
    else:
        parts = open_files(options.format, find_files(options.files), field)
    names = ("format", "dataset", "subset", "split", "field")
    done = prepare(
        parts,
        options.output,
        tokenizer,
        Options(options.validation, options.max_malformed, options.max_document_bytes),
        source={name: value for name in names if (value := getattr(options, name)) is not None},
        workers=options.workers or len(os.sched_getaffinity(0)),
        report=lambda line: print(line, file=sys.stderr, flush=True),
        progress=_progress_printer(),
    )
    print(done.summary())
    if options.train_tokenizer is not None:
        made, wanted = done.tokenizer.vocab_size, options.train_tokenizer
        fewer = f", not {wanted:,}: no further pair of tokens occurs twice in this text" if made < wanted else ""
        print(f"{options.tokenizer}: a new tokenizer of {made:,} ids{fewer}")
    words = [shlex.quote(word) for word in _overrides(done, options.tokenizer)]
    print("\nTo train on it:\n\n  python pretrain.py", *words, sep=" \\\n    ")


def _progress_printer() -> Callable[[int, int, State], None]:
    """A function that prints the progress: a line that is overwritten on a terminal, otherwise one line per minute."""
    every, end = (1.0, "\r") if sys.stderr.isatty() else (60.0, "\n")
    began = last = time.monotonic()

    def show(position: int, total: int, state: State) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < every:
            return
        last = now
        tokens, size = (sum(getattr(of, name) for of in state.counts.values()) for name in ("tokens", "text_bytes"))
        share = f"{position / total:.0%}, " if total else ""
        done = f"{state.records:,} records, {tokens:,} tokens, {state.num_malformed:,} malformed"
        print(f"{share}{done}, {size / (now - began) / 1e6:.1f} MB/s", end=end, file=sys.stderr, flush=True)

    return show


def _overrides(done: Prepared, tokenizer: str) -> list[str]:
    name = re.sub(r"\W", "_", done.output.name, flags=re.ASCII)
    name = name if name.isidentifier() else f"source_{name}"
    held_out = prefix_of(done.output, "validation").resolve()
    vocab_size = -(-done.tokenizer.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return [
        "data=indexed",
        f"data.sources={{{name}: {_quoted(done.output.resolve())}}}",
        *([f"data.validation={{{name}: {_quoted(held_out)}}}"] if done.state.counts["validation"].documents else []),
        f"data.tokenizer={_quoted(Path(tokenizer).resolve())}",
        f"data.phases=[{{name: main, fraction: 1.0, blend: {{{name}: 1.0}}}}]",
        f"model.vocab_size={vocab_size}",
        f"run.dir=runs/{name}",
    ]


def _quoted(value: object) -> str:
    text = str(value)
    return text if re.fullmatch(r"[A-Za-z0-9_./-]+", text) else "'" + text.replace("'", "\\'") + "'"


def _error_line(error: Exception, output: Path | None = None) -> str:
    # Imported here: each process that tokenizes imports this file, and PyTorch would cost it seconds and 300 MB.
    from megatron_fp4.runtime.errors import error_line

    return error_line(error, output)


def _merge(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prepare_data.py merge",
        description="Merge several pairs into one, in the given order. The result has the same bytes as preparing all "
        "texts with one command. Nothing is overwritten. Pairs with different tokenizers in their .json are refused.",
    )
    add = parser.add_argument
    add("--inputs", nargs="+", required=True, metavar="PREFIX", help="prefixes, quoted patterns, or .yaml lists")
    add("--output", required=True, type=Path, metavar="PREFIX", help="path of the new .bin and .idx, without ending")
    options = parser.parse_args(arguments)
    try:
        found = prefixes("--inputs", options.inputs)
        count = merge(found, options.output, lambda line: print(line, file=sys.stderr, flush=True))
    except (ValueError, OSError) as error:
        return _failed(_error_line(error, options.output), command=" merge")
    size = f", {count.text_bytes:,} bytes of text" if count.text_bytes else ""
    print(f"{options.output}: {count.documents:,} documents, {count.tokens:,} tokens{size}, of {len(found)} pairs")
    return 0


def _check(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prepare_data.py check",
        description="Check datasets completely: every entry of the index, every token id, and their .json. Name them "
        "as in data.sources. Exit code 2: at least one of them is wrong.",
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="a prefix, 'pattern', URL or .yaml list")
    options = parser.parse_args(arguments)
    try:
        found = prefixes("PREFIX", options.prefixes)
    except (ValueError, OSError) as error:
        return _failed(_error_line(error), command=" check")
    code = 0
    for prefix in dict.fromkeys(found):
        try:
            print(f"{prefix}: {check_pair(prefix)}", flush=True)
        except (ValueError, OSError) as error:
            code = _failed(_error_line(error), command=" check")
    return code


if __name__ == "__main__":
    # Like Ctrl-C, so that the work so far can be resumed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
