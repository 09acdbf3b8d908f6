"""What makes a run's numbers besides its data: configuration, code, libraries and machine. All ranks must have the
same, and a resume prints what has changed since the checkpoint."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fp4 import __version__
from megatron_fp4.config.compose import NAMES_DATA, as_saved
from megatron_fp4.config.schema import Config, ConfigError

_ROOT = Path(__file__).resolve().parents[2]
_CODE = ("megatron_fp4", "models", "data")
_LIBRARIES = ("torch", "triton", "transformer_engine", "mamba_ssm", "causal_conv1d")
# Keys that may differ between nodes if the environment gives them: they name places, and do not change numbers.
_PLACES = ("run.dir", "checkpoint.resume", "checkpoint.initialize_from", "logging.")
_ABSENT = "(absent)"
_SHOWN = 4


@cache
def revision() -> str:
    """The commit of the checkout, such as `0123456789ab`. With uncommitted changes, `+` and eight digits of their hash
    follow. Without git, `version 0.2.0`."""
    if not (_ROOT / ".git").exists():  # a parent folder may be another repository
        return f"version {__version__}"
    try:
        commit, changes = _git("rev-parse", "--short=12", "HEAD").decode().strip(), _git("diff", "HEAD")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return f"version {__version__}"
    return f"{commit}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def _git(*arguments: str) -> bytes:
    # Git refuses a checkout of another user, as in a container, unless it is named safe.
    command = ["git", "-c", f"safe.directory={_ROOT}", *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, check=True, timeout=10).stdout


def made_by(device: torch.device) -> dict[str, str]:
    """What makes a run's numbers on this rank besides configuration and data: name -> version, kind or hash.

    code: a hash of the Python files, which tells installed copies apart too. commit: its name, for people.
    """
    facts = {"code": _code(), "commit": revision()}
    for name in _LIBRARIES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = _ABSENT
    if device.type == "cuda":
        # Not cuDNN's version: asking torch for it loads the library, and then Transformer Engine cannot be imported.
        return facts | {"CUDA": f"{torch.version.cuda}", "GPU": torch.cuda.get_device_name(device)}
    return facts | {
        "ATEN_CPU_CAPABILITY": torch.backends.cpu.get_cpu_capability(),
        "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL"),
        "OMP_NUM_THREADS": f"{torch.get_num_threads()}",
    }


@cache
def _code() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for name in _CODE for path in (_ROOT / name).rglob("*.py") if path.is_file()):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def settings_of(config: Config) -> dict[str, str]:
    """The keys of a configuration that all ranks must have the same, with their values as text.

    Without the keys that name data, because nodes may have copies, whose content is compared (data/provider.py). A
    value from the environment is shown as its text and a hash.
    """
    composed = asdict(config)
    del composed["from_environment"]
    texts, settings = dict(_leaves(as_saved(config))), {}
    for key, value in _leaves(composed):
        text = texts.get(key, "from the environment")
        if text != value and not key.startswith(_PLACES):
            text = f"{text} ({hashlib.sha256(value.encode()).hexdigest()[:8]})"
        if not key.startswith(NAMES_DATA):
            settings[key] = text
    return settings


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, list | dict) and node:
        for name, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(inner, f"{key}[{name}]" if isinstance(node, list) else f"{key}.{name}".lstrip("."))
    else:
        yield key, node if isinstance(node, str) else json.dumps(node)


def changed_facts(before: Mapping[str, str], now: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(name, before, now) of each fact that differs. A commit that did not change the code is not a change."""
    pairs = {name: (before.get(name, _ABSENT), now.get(name, _ABSENT)) for name in {**now, **before}}
    if len({*pairs.get("code", ())}) == 1:
        pairs.pop("commit", None)
    return [(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]


def check_same(
    facts: Mapping[str, str],
    remedy: str = "Start all with the same command, code and libraries, on the same kind of machine",
) -> None:
    """Raise ConfigError on all ranks, unless all ranks have the same `facts`. A collective."""
    of_rank_0: list[Any] = [dict(facts)]
    dist.broadcast_object_list(of_rank_0, src=0)
    changes = changed_facts(of_rank_0[0], facts)
    differing = [f"{name}={mine}, and rank 0 has {theirs}" for name, theirs, mine in changes]
    more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, ("; ".join(differing[:_SHOWN]) + more, socket.gethostname()))
    wrong = [f"rank {rank} ({host}) has {text}" for rank, (text, host) in enumerate(outcomes) if text]
    if wrong:
        others = f"; {len(wrong) - 1} more ranks differ, too" if len(wrong) > 1 else ""
        raise ConfigError(f"the ranks are not alike: {wrong[0]}{others}. {remedy}")
