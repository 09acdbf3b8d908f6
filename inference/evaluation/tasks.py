"""Tasks of lm-eval by name: which there are, which need a network, and their documents loaded.

Shipped tasks (inference/tasks) and task files of one's own that read local files are loaded with the Hugging Face
libraries told to stay offline. They read that when they are imported, so `prepare_environment` has to come first.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference.evaluation.folder import MISSING, first_line

SHIPPED = Path(__file__).resolve().parent.parent / "tasks"
# What `dataset_path` may name besides a folder without being fetched.
_LOCAL_FORMATS = {"arrow", "csv", "json", "pandas", "parquet", "text"}
_NAME = re.compile(r"^(?:- )?(?:task|group|tag):[ \t]*[\"']?([\w./*-]+)[\"']?[ \t]*(?:#.*)?$", re.MULTILINE)
_DATASET = re.compile(r"^dataset_path:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)


def prepare_environment(names: Sequence[str], include: Path | None) -> bool:
    """Before lm-eval is imported: no network unless one of the tasks needs it; returns whether one may.

    What the environment says already about being offline stays.
    """
    standard = is_standard(names, include)
    if not standard:
        for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ.setdefault(variable, "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Bootstraps would fork a process that has threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    return standard


def is_standard(names: Sequence[str], include: Path | None) -> bool:
    """Whether a task is one of lm-eval's own, or reads a dataset that may have to be fetched. As far as the files tell
    without lm-eval: in doubt, yes."""
    local, remote = _names_of(SHIPPED)
    if include is not None:
        more = _names_of(include)
        local, remote = local | more[0], remote | more[1]
    for name in names:
        if _is_file(name):
            if _remote(Path(name)):
                return True
        elif not fnmatch.filter(local, name) or fnmatch.filter(remote, name):
            return True
    return False


def _names_of(folder: Path) -> tuple[set[str], set[str]]:
    """Tasks, groups and tags of task files: those that read local files, those that do not."""
    local: set[str] = set()
    remote: set[str] = set()
    for file in folder.rglob("*.yaml"):
        text = file.read_text(encoding="utf-8", errors="replace")
        for included in re.findall(r"^include:[ \t]*(\S+)", text, re.MULTILINE):
            if (file.parent / included).is_file():
                text += "\n" + (file.parent / included).read_text(encoding="utf-8", errors="replace")
        (remote if _remote(file) else local).update(_NAME.findall(text))
    return local, remote


def _remote(file: Path) -> bool:
    try:
        found = _DATASET.findall(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return False
    return any(path not in _LOCAL_FORMATS and not Path(path).exists() for path in found)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def load_tasks(
    names: Sequence[str], include: Path | None = None, num_fewshot: int | None = None, standard: bool = True
) -> Mapping[str, Any]:
    """What lm-eval's `evaluate` takes: tasks and groups by name, their documents loaded.

    names: of tasks, groups, tags, patterns of these, or task files. include: a folder with task files. standard:
    whether lm-eval's own tasks are looked at. Raises ValueError, in one line, for an unknown name, documents that
    cannot be had, a task that runs what a model writes, and examples where a task wants none.
    """
    if include is not None and not include.is_dir():
        raise ValueError(f"--include-path {include} is not a folder; give the one with the task files")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(MISSING) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # lm-eval finds files in folders of given names; later ones override.
    folders = [str(folder) for folder in (SHIPPED, include) if folder is not None]
    manager = TaskManager(include_path=folders, include_defaults=standard)
    found: list[Any] = []
    for name in names:
        found += [name] if _is_file(name) else _matching(manager, name)
    loaded: Any = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in dict.fromkeys(found):
        try:
            more = manager.load([name])
        except Exception as error:  # any type: of datasets, of hub and network, of the task's own code
            raise ValueError(
                f"task {name} cannot be loaded ({first_line(error)}); a standard task needs a network once, or its "
                "dataset in the cache of Hugging Face (HF_HOME)"
            ) from error
        for part in loaded:
            loaded[part].update(more.get(part, {}))
    for name, task in loaded["tasks"].items():
        _prepare(name, task, num_fewshot)
    return loaded


def _matching(manager: Any, name: str) -> list[str]:
    found = manager.match_tasks([name])
    if found:
        return found
    close = difflib.get_close_matches(name, manager.all_tasks, 3)
    hint = f"did you mean {', '.join(close)}?" if close else "shipped are builtin_cloze_code and others by --tasks list"
    raise ValueError(f"there is no task {name!r}; {hint}")


def _prepare(name: str, task: Any, num_fewshot: int | None) -> None:
    """As lm-eval's simple_evaluate does, but that nothing asked for is left out."""
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(
            f"task {name} runs the code that the model writes; export the model and run it with lm-eval's own command "
            "in a sandbox (--confirm_run_unsafe_code)"
        )
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own == 0 and num_fewshot != 0:
        raise ValueError(f"task {name} takes no examples; leave out --num-fewshot {num_fewshot}, or the task")
    if num_fewshot is not None or own is None:
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=1234)


def task_names(include: Path | None = None) -> list[str]:
    """Shipped tasks and those of a folder, without lm-eval's own, and without importing it."""
    return sorted(set().union(*_names_of(SHIPPED), *(_names_of(include) if include else ())))
