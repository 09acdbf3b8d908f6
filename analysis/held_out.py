"""Held-out losses of runs that are compared with each other, and which of them belong together.

Two runs make a pair if they began alike and read the same tokens in the same order; what differs between them is the
recipe, and how its noise grows. A run from scratch begins with the weights of its `run.seed`. A branch begins with a
checkpoint of another run (`checkpoint.resume` or `checkpoint.initialize_from` with a path), and its own seed is that of
stochastic rounding. Checkpoints that are equal in every bit are one start, also where their trunk was made twice.
"""

from __future__ import annotations

import argparse
import glob
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_fp4.logging.metrics import records_of_run
from megatron_fp4.logging.other_settings import settings_of
from megatron_fp4.logging.run_folder import check_sources


class Pair(NamedTuple):
    """What runs of a pair have in common. start: `seed 1`, or the name of a checkpoint by its content. data_seed: of
    the order of the data."""

    start: str
    data_seed: int


@dataclass(frozen=True)
class HeldOut:
    """Validation losses of one run.

    losses: by tokens trained on, nats per token, mean of the sources, each weighed alike. sources: the same by source.
    seed, data_seed: `run.seed` and `data.seed` (None: the run's). start: of a branch, which checkpoint it began from;
    known_as: what that is known by, its manifest first, its contents last if they were recorded. trunk: the folder, as
    it was called then, of the run whose checkpoint that is. steps: how many the run is to have.
    final: tokens of its last validation if the run is finished. lost: tokens of its last validation if that has a loss
    that cannot be compared, because it is no finite number above zero. folder: where it lies. only: the sources that
    count, if it was validated on others, too; else empty. settings: of `other_settings.py`.
    """

    seed: int
    losses: dict[int, float]
    sources: dict[int, dict[str, float]] = field(default_factory=dict)
    data_seed: int | None = None
    start: str | None = None
    trunk: str | None = None
    steps: int | None = None
    final: int | None = None
    lost: int | None = None
    folder: str = ""
    only: tuple[str, ...] = ()
    known_as: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """For messages."""
        return Path(self.folder).name

    @property
    def pair(self) -> Pair:
        """What a partner must have, too."""
        return Pair(self.start or f"seed {self.seed}", self.seed if self.data_seed is None else self.data_seed)

    @property
    def final_losses(self) -> dict[int, float]:
        """Of a finished run its last loss, by tokens; else empty."""
        return {} if self.final is None else {self.final: self.losses[self.final]}


def read_held_out(run_dir: str | Path, sources: Sequence[str] = ()) -> HeldOut:
    """Of the run in `run_dir`, finished or not.

    sources: those that count (default: all); a validation that lacks one of them is passed over. Raises
    FileNotFoundError if there is no metrics.jsonl or no config.yaml, and ValueError if the seed is not in config.yaml,
    or the run was never validated on one of `sources`.
    """
    config_file = Path(run_dir) / "config.yaml"
    if not config_file.exists():
        raise FileNotFoundError(f"{config_file} does not exist; name the folder of a run (its run.dir)")
    try:
        config = yaml.safe_load(config_file.read_text())
        seed, data_seed = int(config["run"]["seed"]), (config.get("data") or {}).get("seed")
        data_seed, settings = None if data_seed is None else int(data_seed), settings_of(config)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{config_file} names no run.seed, or one that is no number") from error
    records = records_of_run(run_dir)
    validations = [record for record in records if record["kind"] == "validation" and record["losses"]]
    there = list(dict.fromkeys(name for record in validations for name in record["losses"]))
    check_sources(sources, there, str(run_dir))
    losses, by_source, last, lost = {}, {}, 0, None
    for record in validations:
        measured, tokens = record["losses"], int(record["tokens"])
        if sources:
            if any(name not in measured for name in sources):
                continue
            measured = {name: measured[name] for name in sources}
        lost = None if all(map(_comparable, measured.values())) else tokens
        if lost is None:
            last = int(record["step"])
            losses[tokens], by_source[tokens] = statistics.mean(measured.values()), measured
    starts = [record for record in records if record["kind"] == "run"]
    steps = starts[-1].get("steps") if starts else None
    finished = bool(losses) and lost is None and last == (last if steps is None else steps)
    start, trunk, known_as = start_of(starts)
    final = max(losses) if finished else None
    folder = str(Path(run_dir).resolve())
    only = tuple(dict.fromkeys(sources)) if set(there) > set(sources) else ()
    return HeldOut(
        seed,
        losses,
        by_source,
        data_seed,
        start=start,
        trunk=trunk,
        steps=steps,
        final=final,
        lost=lost,
        folder=folder,
        only=only,
        known_as=known_as,
        settings=settings,
    )


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Give a command the option that says which sources count; its value is a list of names, empty for all."""
    parser.add_argument(
        "--sources", type=lambda names: names.split(","), default=[], metavar="NAME,NAME,...",
        help="the held-out sources that count, each alike (default: all)",
    )  # fmt: skip


def _comparable(loss: object) -> bool:
    return isinstance(loss, int | float) and math.isfinite(loss) and loss > 0


def start_of(starts: Sequence[Mapping[str, Any]]) -> tuple[str | None, str | None, tuple[str, ...]]:
    """The checkpoint that a run with these `run` records began from; if it took its whole state, the folder of the run
    that saved it; and `HeldOut.known_as`. None, None and empty if it began from nothing.

    The same checkpoint has the same name wherever it lies; with its whole state and as weights alone two names.
    """
    for how in ("origin", "initialized_from"):
        for origin in (start.get(how) for start in starts):
            if isinstance(origin, Mapping):
                path = Path(str(origin.get("path", "")))
                step, manifest = origin.get("step"), str(origin.get("manifest_sha256", path))
                digests = manifest, origin.get("contents_sha256")
                known_as = tuple(f"{how} step {step} {digest}" for digest in digests if digest)
                run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
                start = f"{run.name} step {step} ({manifest[:12]}"
                if how == "origin":
                    return f"{start})", str(run), known_as
                return f"{start}, weights alone)", None, known_as
    return None, None, ()


def read_groups(arguments: Sequence[str], sources: Sequence[str] = ()) -> dict[str, list[HeldOut]]:
    """Groups of runs from `NAME=RUN,RUN,...`, in their order; a RUN is a folder or a pattern of folders.

    Starts that are equal in every bit have one name, that of the first of them, whatever their trunks are called.
    sources: the held-out sources that count (default: all). Raises ValueError for an argument of another form, a name
    or a run that comes twice, or fewer than two groups, and what `read_held_out` raises.
    """
    folders = _folders_of(arguments)
    groups = {name: [read_held_out(folder, sources) for folder in of_group] for name, of_group in folders.items()}
    runs = runs_of(groups)
    # What an older record knows by its manifest alone, a newer one of the same checkpoint knows by its contents, too.
    contents_of = {run.known_as[0]: run.known_as[-1] for run in runs if len(run.known_as) > 1}

    def key(run: HeldOut) -> str | None:
        return contents_of.get(run.known_as[0], run.known_as[0]) if run.known_as else None

    names = {key(run): run.start for run in reversed(runs)}
    return {name: [replace(run, start=names[key(run)]) for run in of_group] for name, of_group in groups.items()}


def runs_of(groups: Mapping[str, Sequence[HeldOut]]) -> list[HeldOut]:
    """The runs of all groups."""
    return [run for runs in groups.values() for run in runs]


def sources_note(groups: Mapping[str, Sequence[HeldOut]]) -> str | None:
    """A line for below a table of runs of which some sources count, not all; else None."""
    only = dict.fromkeys(name for run in runs_of(groups) for name in run.only)
    return f"held-out losses: of {', '.join(only)} alone" if only else None


def _folders_of(arguments: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    group_of: dict[Path, str] = {}
    for argument in arguments:
        name, equals, texts = argument.partition("=")
        if not (name and equals and all(texts.split(","))) or name in groups:
            raise ValueError(f"{argument}: write each group once, as NAME=RUN,RUN,...")
        groups[name] = []
        for text in texts.split(","):
            found = [text] if Path(text).exists() or not glob.has_magic(text) else sorted(glob.glob(text))
            if not found:
                raise ValueError(f"{text}: no folder has such a name; name the folders of runs of {name}")
            groups[name] += found
        for folder in groups[name]:
            if (other := group_of.setdefault(Path(folder).resolve(), name)) != name:
                raise ValueError(f"{argument}: {folder} is in {other}, too; name each run in one group")
        if len({Path(folder).resolve() for folder in groups[name]}) < len(groups[name]):
            raise ValueError(f"{argument}: a run comes twice in {name}; name each once")
    if len(groups) < 2:
        raise ValueError("name two groups at least, the base first")
    return groups
