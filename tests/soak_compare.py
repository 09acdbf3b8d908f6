"""Whether a run came out as another one did: for tests/soak.py."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tests.soak_disks import checkpoints

# What differs between two runs of the same bits.
TIMES = ("tokens_per_second", "model_tflops", "mfu", "step_time", "data_wait", "peak_memory_gib")


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl; what a kill left unfinished at its end is left out."""
    path = run_dir / "metrics.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [json.loads(line) for line in whole.splitlines()]


def steps_done(run_dir: Path) -> int:
    """The last step of which there is a record."""
    return max((record["step"] for record in records(run_dir) if record["kind"] == "step"), default=0)


def differences(expected: Path, run_dir: Path, damaged: int, power: bool = False) -> list[str]:
    """What is not as in the run that was left alone. damaged: how many checkpoints were, on the way.
    power: it was cut, which may leave pages of zeros at the end of a file that is being written."""
    found = []
    for kind in ("step", "validation"):
        left, right = (
            [{k: v for k, v in one.items() if k not in TIMES} for one in records(folder) if one["kind"] == kind]
            for folder in (expected, run_dir)
        )
        steps = [record["step"] for record in right]
        if steps != [record["step"] for record in left]:
            found.append(f"records of kind {kind} are of steps {steps}")
        else:
            bad = [one["step"] for one, other in zip(left, right, strict=True) if one != other]
            found += [f"other numbers in records of kind {kind} of steps {bad}"] if bad else []
    names = [sorted(path.name for path in checkpoints(folder)) for folder in (expected, run_dir)]
    # One more is there if the last save was killed before it removed the oldest: the next save would. Workers whose
    # torchrun was killed save where they are, and that one counts among those that are kept.
    older = [name for name in names[1] if name < names[0][0]]
    stops = {f"step_{one['step']:08d}" for one in records(run_dir) if one.get("event") == "stop"}
    stopped = [name for name in names[1] if name in stops - set(names[0])]
    pruned = names[0][: len(stopped)]
    kept = [name for name in names[1] if name not in (*older, *stopped)]
    if kept not in (names[0], names[0][len(pruned) :]) or len(older) > 1:
        found.append(f"checkpoints are {names[1]}, not {names[0]}")
    for name in set(names[0]) & set(names[1]):
        found += compare_checkpoints(expected / "checkpoints" / name, run_dir / "checkpoints" / name)
    pointer = (run_dir / "checkpoints" / "latest").read_text()
    if pointer != (expected / "checkpoints" / "latest").read_text():
        found.append(f"`latest` names {pointer.strip()}")
    allowed = r"(metrics\.jsonl|tensorboard)\.\d+"  # of starts before there was a checkpoint
    if damaged:
        allowed += (
            r"|checkpoints/.*damaged.*|summary\.json\.\d+"  # of a run that was finished until its end was damaged
        )
    if power:
        allowed += r"|metrics\.jsonl\.damaged.*"
    here, there = ({str(p.relative_to(root)) for p in entries(root)} for root in (run_dir, expected))
    here -= {f"checkpoints/{name}" for name in (*older, *stopped)}
    there -= {f"checkpoints/{name}" for name in pruned if name not in kept}
    strays = sorted(name for name in here - there if not re.fullmatch(allowed, name))
    found += [f"left over: {', '.join(strays)}"] if strays else []
    missing = sorted(name for name in there - here)
    found += [f"missing: {', '.join(missing)}"] if missing else []
    return found


def entries(run_dir: Path) -> list[Path]:
    """Files and folders directly in a run's folder and its checkpoints/."""
    return [*run_dir.iterdir(), *(run_dir / "checkpoints").iterdir()]


def compare_checkpoints(expected: Path, other: Path) -> list[str]:
    """Weights, moments and generators, as the hashes of the files that hold them; and that the files are what their
    manifest says."""
    found = []
    manifests = [json.loads((folder / "manifest.json").read_text())["files"] for folder in (expected, other)]
    if manifests[0].keys() != manifests[1].keys():
        return [f"{other.name} has the files {sorted(manifests[1])}"]
    for name, record in manifests[1].items():
        if hashlib.sha256((other / name).read_bytes()).hexdigest() != record["sha256"]:
            found.append(f"{other.name}/{name} is not what its manifest says")
        if name.endswith((".distcp", ".pt")) and record != manifests[0][name]:
            found.append(f"{other.name}/{name} has other bits")
    states = [json.loads((folder / "trainer.json").read_text()) for folder in (expected, other)]
    for state in states:
        state["config"] = {key: state["config"][key] for key in state["config"] if key not in ("run", "checkpoint")}
    if states[0] != states[1]:
        keys = sorted(key for key in states[0].keys() | states[1].keys() if states[0].get(key) != states[1].get(key))
        found.append(f"{other.name}: the trainer's state differs in {keys}")
    return found
