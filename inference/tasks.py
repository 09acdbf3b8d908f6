"""Loads tasks of lm-eval by name, and makes our own tasks (`builtin`) from the text of Python's standard library.

Our tasks use the held-out documents of `data/builtin.py`, which no run on the built-in corpus has seen, as text, so
they work with any tokenizer. There are two tasks for each source, with their files in inference/task_files:

`cloze`: choose the last word of a line, after up to 400 characters of context. The three wrong choices are last words
of other held-out lines, drawn at random. So word frequencies do not help. Guessing gives 25%.

`bytes`: the log-probability of every token in passages of up to 2,000 characters, cut at line ends.

Items are chosen by hashes of the documents' names and line numbers, so the same Python gives the same items.
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

from data import builtin
from inference.models import MISSING, in_one_line

SHIPPED = Path(__file__).resolve().parent / "task_files"
# Increase `metadata.version` in inference/task_files with any change to the items.
CLOZE, BYTES = "cloze", "bytes"
CLOZE_ITEMS, BYTES_ITEMS = 400, 64
_DISTRACTORS = 3
_CONTEXT_CHARACTERS, _LEAST_CONTEXT = 400, 60
_PASSAGE_CHARACTERS = 2000
# The last word of a line comes after a space, where tokenizers cut; only punctuation may follow it.
_LAST_WORD = re.compile(r"(.*\S) ([A-Za-z_][A-Za-z0-9_]{2,})[^A-Za-z0-9_]*")


def is_shipped(name: str) -> bool:
    """Whether a name, pattern or tag matches tasks in inference/task_files. Does not import lm-eval."""
    return bool(fnmatch.filter(["builtin", *(file.stem for file in SHIPPED.glob("*.yaml"))], name))


def prepare_environment(names: Sequence[str]) -> None:
    """Set environment variables for lm-eval's libraries, which read them when they are imported: no network if all
    tasks are shipped ones. Variables that are set already are not changed."""
    if all(map(is_shipped, names)):
        for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ.setdefault(variable, "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Otherwise lm-eval's bootstrap forks this process, which has threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")


def load_tasks(names: Sequence[str], include: Path | None = None, num_fewshot: int | None = None) -> Mapping[str, Any]:
    """The tasks and groups for lm-eval's `evaluate`, by name, with loaded documents.

    names: tasks, groups, tags, patterns of these, or task files. include: a folder with task files. Raises ValueError
    for an unknown name, unreadable documents, a task that runs code, and missing examples.
    """
    if include is not None and not include.is_dir():
        raise ValueError(f"--include-path {include} is not a folder; give the one with the task files")
    manager = _manager(include, own=False)  # first without lm-eval's own tasks, which are thousands of files

    def matching(name: str) -> list[str]:
        return [name] if name.endswith((".yaml", ".yml")) else manager.match_tasks([name])

    if not all(map(matching, names)):
        manager = _manager(include, own=True)
    found: list[str] = []
    for name in names:
        if not (names_of := matching(name)):
            close = difflib.get_close_matches(name, manager.all_tasks, 3)
            hint = f"did you mean {', '.join(close)}?" if close else "--tasks builtin runs all shipped tasks"
            raise ValueError(f"there is no task {name!r}; {hint}")
        found += names_of
    loaded: Any = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in dict.fromkeys(found):
        try:
            more = manager.load([name])
        except Exception as error:  # any type: from datasets, the hub, the network or the task's own code
            raise ValueError(
                f"task {name} cannot be loaded ({in_one_line(error)}); a standard task needs the network once, or its "
                "dataset in the cache of Hugging Face (HF_HOME)"
            ) from error
        for part in loaded:
            loaded[part].update(more.get(part, {}))
    for name, task in loaded["tasks"].items():  # as in simple_evaluate, but an option without effect is an error
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
    """The task files of SHIPPED, then of `include`, which override. own: also lm-eval's own tasks."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(MISSING) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folders = [str(folder) for folder in (SHIPPED, include) if folder is not None]
    return TaskManager(include_path=folders, include_defaults=own)


def load_dataset(kind: str, source: str, **_: Any) -> dict[str, Any]:
    """The data of a task in inference/task_files, which lm-eval calls: {"test": items of this Python}. kind: CLOZE or
    BYTES. source: CODE or PROSE. Raises ValueError for a Python without the standard library's source code."""
    import datasets

    return {"test": datasets.Dataset.from_list(_items()[f"{kind}_{source}"])}


@functools.cache
def _items() -> dict[str, list[dict[str, Any]]]:
    library = builtin.standard_library()
    documents = builtin.collect_documents(library)
    builtin.check_enough(documents, library)
    return make_items(documents)


def make_items(documents: Sequence[builtin.Document]) -> dict[str, list[dict[str, Any]]]:
    """The items of `cloze_code`, `bytes_code` and so on, from held-out documents: at most CLOZE_ITEMS and BYTES_ITEMS.

    cloze: origin, context, choices, answer (the index of the right choice). bytes: origin, text.
    """
    _, held_out = builtin.split_documents(documents, builtin.HELD_OUT_FRACTION)
    items: dict[str, list[dict[str, Any]]] = {}
    for source in (builtin.CODE, builtin.PROSE):
        chosen = [document for document in held_out if document.source == source]
        items[f"{CLOZE}_{source}"] = _cloze(chosen)
        passages = [(f"{d.origin}/{n}", d.origin, text) for d in chosen for n, text in enumerate(_passages(d))]
        picked = sorted(passages, key=lambda passage: _hash(f"{BYTES}/{passage[0]}/{passage[2]}"))[:BYTES_ITEMS]
        items[f"{BYTES}_{source}"] = [{"origin": origin, "text": text} for _, origin, text in picked]
    return items


def _passages(document: builtin.Document) -> Iterator[str]:
    """The document's text in passages of complete lines; a longer line is one passage."""
    piece = ""
    for line in document.text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > _PASSAGE_CHARACTERS:
            yield piece
            piece = ""
        piece += line
    if piece.strip():
        yield piece


def _cloze(documents: Sequence[builtin.Document]) -> list[dict[str, Any]]:
    lines = []  # name, origin, context, last word
    for document in documents:
        before = ""
        for line_number, line in enumerate(document.text.splitlines(keepends=True)):
            match = _LAST_WORD.fullmatch(line.rstrip("\n"))
            context = before + (match[1] if match else "")
            if match and len(context) >= _LEAST_CONTEXT:
                # Several documents may have the same origin, such as the docstrings of a module.
                name = f"{document.origin}/{_hash(document.text):x}/{line_number}"
                lines.append((name, document.origin, context, match[2]))
            before += line
            if len(before) > _CONTEXT_CHARACTERS:  # keep the last complete lines
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
    """Up to three different words other than `word`, drawn from `words` at random by their frequency."""
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
