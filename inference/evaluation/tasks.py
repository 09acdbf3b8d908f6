"""Tasks of lm-eval by name: which there are, which need a network, and their documents loaded.

Shipped tasks (inference/tasks) and task files of one's own that read local files are loaded with the Hugging Face
libraries told to stay offline. They read that when they are imported, so `prepare_environment` has to come first.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from inference.evaluation.folder import MISSING, first_line

SHIPPED = Path(__file__).resolve().parent.parent / "tasks"
# What `dataset_path` may name besides a folder without being fetched.
_LOCAL_FORMATS = {"arrow", "csv", "json", "pandas", "parquet", "text"}


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
    local, remote = _names_of(SHIPPED, include)
    for name in names:
        if _is_file(name):
            if _reaches_out(_read(Path(name)), local):
                return True
        elif not fnmatch.filter(local, name) or fnmatch.filter(remote, name):
            return True
    return False


def task_names(include: Path | None = None) -> list[str]:
    """Shipped tasks, groups and tags and those of a folder; lm-eval's own are not among them, nor is it imported."""
    return sorted(set().union(*_names_of(SHIPPED, include)))


def _names_of(*folders: Path | None) -> tuple[set[str], set[str]]:
    """Tasks, groups and tags of task files: those of files alone, and those that may need a network."""
    found = [_read(file) for folder in folders if folder is not None for file in folder.rglob("*.yaml")]
    local = {name for settings in found for name in _named(settings)}
    remote: set[str] = set()
    while more := {n for s in found if _reaches_out(s, local - remote) for n in _named(s)} - remote:
        remote |= more
    return local - remote, remote


def _named(settings: Mapping[str, Any]) -> list[str]:
    """What a file can be asked for by."""
    names = [settings.get("task"), settings.get("group"), *_listed(settings.get("tag"))]
    return [name for name in names if isinstance(name, str)]


def _reaches_out(settings: Mapping[str, Any], local: set[str]) -> bool:
    """Whether a task's dataset is neither of files nor of a function, or a group has members that are not local."""
    members = [m.get("task") if isinstance(m, dict) else m for m in _listed(settings.get("task"))]
    if "group" in settings and not set(members) <= local:
        return True
    dataset = settings.get("dataset_path")
    return dataset is not None and dataset not in _LOCAL_FORMATS and not Path(str(dataset)).exists()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _read(file: Path, depth: int = 0) -> dict[str, Any]:
    """A task file with those that it includes, its functions left out; nothing if it is none."""
    try:
        settings = yaml.load(file.read_text(encoding="utf-8"), Loader=_Tolerant)
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # lm-eval says what is wrong if it is asked for
    if not isinstance(settings, dict):
        return {}
    below: dict[str, Any] = {}
    for included in _listed(settings.get("include")) if depth < 8 else ():
        below |= _read(file.parent / str(included), depth + 1)
    return below | settings


class _Tolerant(yaml.SafeLoader):
    """Of files with tags that only lm-eval knows, such as `!function`."""


_Tolerant.add_multi_constructor("!", lambda loader, suffix, node: None)


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
