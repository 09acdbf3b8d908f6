"""Tasks of lm-eval by name, their documents loaded; and those that are made from the text that every Python carries, of
which no run on the builtin corpus saw anything.

The documents of these are the held-out ones of `data/builtin.py`, as text: any tokenizer will do. Two tasks for each
source, with their files in inference/task_files:

`cloze`: a line of a document without its last word, after up to 400 characters of what comes before it. Which word is
it? Of four, the others are last words of other held-out lines of the source, drawn at random; so the right one and the
wrong ones have the same distribution, and knowing how frequent words are tells nothing. A quarter is right by guessing.

`bytes`: passages of up to 2,000 characters, cut at ends of lines, of which the log-probability of every token counts.

What is chosen follows from hashes of the documents' names and line numbers: the same Python makes the same items. The
repository has none of the text.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.builtin import (
    CODE,
    HELD_OUT_FRACTION,
    PROSE,
    Document,
    check_enough,
    collect_documents,
    split_documents,
    standard_library,
)
from inference.models import MISSING, in_one_line

SHIPPED = Path(__file__).resolve().parent / "task_files"
# Raise `metadata.version` in inference/task_files with any change to what is chosen.
CLOZE, BYTES = "cloze", "bytes"
CLOZE_ITEMS, BYTES_ITEMS = 400, 64
_DISTRACTORS = 3
_CONTEXT_CHARACTERS, _LEAST_CONTEXT = 400, 60
_PASSAGE_CHARACTERS = 2000
# A space, and then a word with at most punctuation after it: tokenizers cut there.
_LAST_WORD = re.compile(r"(.*\S) ([A-Za-z_][A-Za-z0-9_]{2,})[^A-Za-z0-9_]*")


def is_shipped(name: str) -> bool:
    """Whether a name or pattern is of tasks, or the tag, of inference/task_files alone; lm-eval is not imported."""
    return bool(fnmatch.filter(["builtin", *(file.stem for file in SHIPPED.glob("*.yaml"))], name))


def prepare_environment(names: Sequence[str]) -> None:
    """Before lm-eval is imported, whose libraries read these variables then: no network if all tasks are shipped ones.
    What the environment says already stays."""
    if all(map(is_shipped, names)):
        for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ.setdefault(variable, "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Bootstraps would fork a process that has threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")


def load_tasks(names: Sequence[str], include: Path | None = None, num_fewshot: int | None = None) -> Mapping[str, Any]:
    """What lm-eval's `evaluate` takes: tasks and groups by name, their documents loaded.

    names: of tasks, groups, tags, patterns of these, or task files. include: a folder with task files. Raises
    ValueError, in one line, for an unknown name, documents that cannot be had, a task that runs what a model writes,
    and examples where a task wants none.
    """
    if include is not None and not include.is_dir():
        raise ValueError(f"--include-path {include} is not a folder; give the one with the task files")
    manager = _manager(include, own=False)  # lm-eval's own are thousands of files

    def matching(name: str) -> list[str]:
        return [name] if name.endswith((".yaml", ".yml")) else manager.match_tasks([name])

    if not all(map(matching, names)):
        manager = _manager(include, own=True)
    found: list[str] = []
    for name in names:
        if not (names_of := matching(name)):
            close = difflib.get_close_matches(name, manager.all_tasks, 3)
            hint = f"did you mean {', '.join(close)}?" if close else "--tasks builtin has all that are shipped"
            raise ValueError(f"there is no task {name!r}; {hint}")
        found += names_of
    loaded: Any = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in dict.fromkeys(found):
        try:
            more = manager.load([name])
        except Exception as error:  # any type: of datasets, of hub and network, of the task's own code
            raise ValueError(
                f"task {name} cannot be loaded ({in_one_line(error)}); a standard task needs a network once, or its "
                "dataset in the cache of Hugging Face (HF_HOME)"
            ) from error
        for part in loaded:
            loaded[part].update(more.get(part, {}))
    for name, task in loaded["tasks"].items():  # as lm-eval's simple_evaluate does, but that nothing is left out
        if getattr(task, "UNSAFE_CODE", False):
            raise ValueError(
                f"task {name} runs the code that the model writes; export the model and run it with lm-eval's own "
                "command in a sandbox (--confirm_run_unsafe_code)"
            )
        own = task.get_config("num_fewshot")
        if num_fewshot and own == 0:
            raise ValueError(f"task {name} takes no examples; leave out --num-fewshot {num_fewshot}, or the task")
        if num_fewshot is not None or own is None:
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=1234)
    return loaded


def _manager(include: Path | None, own: bool) -> Any:
    """own: with lm-eval's own tasks. Files in folders that are named later override."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(MISSING) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folders = [str(folder) for folder in (SHIPPED, include) if folder is not None]
    return TaskManager(include_path=folders, include_defaults=own)


def load_dataset(kind: str, source: str, **_: Any) -> dict[str, Any]:
    """What the task files of inference/task_files name as their data, for lm-eval: the split `test`, of the items of
    this Python. kind, source: CLOZE or BYTES, of CODE or PROSE. Raises ValueError for a Python without its sources.
    """
    import datasets

    return {"test": datasets.Dataset.from_list(_items()[f"{kind}_{source}"])}


@functools.cache
def _items() -> dict[str, list[dict[str, Any]]]:
    library = standard_library()
    documents = collect_documents(library)
    check_enough(documents, library)
    return make_items(documents)


def make_items(documents: Sequence[Document]) -> dict[str, list[dict[str, Any]]]:
    """`cloze_code` and so on -> its items, from the held-out documents among these; as many as there are, up to
    CLOZE_ITEMS and BYTES_ITEMS. Pure.

    cloze: origin, context, choices, answer (its number). bytes: origin, text.
    """
    _, held_out = split_documents(documents, HELD_OUT_FRACTION)
    items: dict[str, list[dict[str, Any]]] = {}
    for source in (CODE, PROSE):
        chosen = [document for document in held_out if document.source == source]
        items[f"{CLOZE}_{source}"] = _cloze(chosen)
        passages = [
            (f"{d.origin}/{number}", d.origin, text) for d in chosen for number, text in enumerate(_passages(d))
        ]
        picked = sorted(passages, key=lambda passage: _hash(f"{BYTES}/{passage[0]}/{passage[2]}"))[:BYTES_ITEMS]
        items[f"{BYTES}_{source}"] = [{"origin": origin, "text": text} for _, origin, text in picked]
    return items


def _passages(document: Document) -> Iterator[str]:
    """The document's text in pieces of whole lines; a line that is longer than a piece is one."""
    piece = ""
    for line in document.text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > _PASSAGE_CHARACTERS:
            yield piece
            piece = ""
        piece += line
    if piece.strip():
        yield piece


def _cloze(documents: Sequence[Document]) -> list[dict[str, Any]]:
    lines = []  # name, origin, context, last word
    for document in documents:
        before = ""
        for line_number, line in enumerate(document.text.splitlines(keepends=True)):
            match = _LAST_WORD.fullmatch(line.rstrip("\n"))
            context = before + (match[1] if match else "")
            if match and len(context) >= _LEAST_CONTEXT:
                # A document may share its origin with others, such as the docstrings of a module.
                name = f"{document.origin}/{_hash(document.text):x}/{line_number}"
                lines.append((name, document.origin, context, match[2]))
            before += line
            if len(before) > _CONTEXT_CHARACTERS:  # the last whole lines of it
                before = before[-_CONTEXT_CHARACTERS:]
                before = before[before.index("\n") + 1 :] if "\n" in before[:-1] else before
    items, words = [], sorted(line[3] for line in lines)
    for name, origin, context, word in sorted(lines, key=lambda line: _hash(f"{CLOZE}/{line[0]}"))[:CLOZE_ITEMS]:
        choices = [word, *_distractors(name, word, words)]
        if len(choices) > _DISTRACTORS:
            choices.sort(key=lambda choice: _hash(f"{name}/{choice}"))
            items.append({"origin": origin, "context": context, "choices": choices, "answer": choices.index(word)})
    return items


def _distractors(name: str, word: str, words: Sequence[str]) -> list[str]:
    """Up to three of `words` that differ from the word and each other, each as likely as it is frequent."""
    found: list[str] = []
    for draw in range(64):
        other = words[_hash(f"{name}/{draw}") % len(words)]
        if other != word and other not in found:
            found.append(other)
        if len(found) == _DISTRACTORS:
            break
    return found


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
