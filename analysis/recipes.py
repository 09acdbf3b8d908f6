"""The cost of recipes over several seeds or branches: compares each run with its partner in the base group.

Two runs are partners if they have the same start and read the same tokens in the same order. They then differ only in
the recipe and in the noise that follows from it. The start of a run from scratch is its `run.seed`, which determines
the initial weights. The start of a branch is the content of the checkpoint of another run, its trunk, from which it
began; its own seed affects only stochastic rounding. A branch without a partner has the partners of its trunk. A run
from scratch without a partner has a branch in the base that only made its trunk longer (as for a curve).
"""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.price import Curve, fit
from analysis.runs import difference_line, differences, settings_of
from analysis.statistics import draw_estimates, estimates, gap_text, pooled, share_text
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.console import counted, markdown, short_tokens
from megatron_fp4.logging.files import METRICS_FILE
from megatron_fp4.logging.run_folder import read_mapping, read_records

MEAN = ""  # in the place of a held-out source: the unweighted mean of all sources


class Pair(NamedTuple):
    """What partners have in common. start: `seed 1`, or a checkpoint. data_seed: the seed of the order of the data."""

    start: str
    data_seed: int


@dataclass(frozen=True)
class HeldOut:
    """The held-out losses of one run.

    losses: in nats per token, by number of tokens and source (and MEAN). trunk: the folder of a branch's trunk.
    from_scratch: if the run has the same steps as a run from scratch, the pair of that run. steps: planned number.
    final: the tokens of the last validation if the run is finished. problem: why the run is not compared at the end.
    settings: besides the recipe.
    """

    folder: Path
    seed: int
    pair: Pair
    losses: dict[int, dict[str, float]]
    trunk: Path | None = None
    from_scratch: Pair | None = None
    steps: int | None = None
    final: int | None = None
    problem: str = ""
    settings: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        return self.folder.name


Groups = Mapping[str, Sequence[HeldOut]]


def read_groups(arguments: Sequence[str]) -> dict[str, list[HeldOut]]:
    """Groups of runs from `NAME=RUN,RUN,...`, in this order; a RUN is a folder or a pattern of folders.

    Raises ValueError for an argument in another form, a name or a run that occurs twice, or fewer than two groups, and
    what `read_held_out` raises.
    """
    groups: dict[str, list[HeldOut]] = {}
    seen: dict[Path, str] = {}
    for argument in arguments:
        name, _, texts = argument.partition("=")
        if not (name and texts and all(texts.split(","))) or name in groups:
            raise ValueError(f"{argument}: write each group once, as NAME=RUN,RUN,...")
        groups[name] = []
        for text in texts.split(","):
            folders = [text] if Path(text).exists() or not glob.has_magic(text) else sorted(glob.glob(text))
            if not folders:
                raise ValueError(f"{text}: no folder matches; name the folders of the runs of {name}")
            for folder in map(Path, folders):
                if (resolved := folder.resolve()) in seen:
                    raise ValueError(f"{argument}: {folder} is in {seen[resolved]} already; name each run once")
                seen[resolved] = name
                groups[name].append(read_held_out(folder))
    if len(groups) < 2:
        raise ValueError("name at least two groups, the base first")
    for runs in groups.values():
        for run in runs:
            if twin := next((o for o in runs if o is not run and (o.pair, o.seed) == (run.pair, run.seed)), None):
                raise ValueError(f"{run.name} and {twin.name} have the same start and seeds; name one run of each")
    return groups


def read_held_out(run_dir: Path) -> HeldOut:
    """The run in `run_dir`, finished or not.

    Raises FileNotFoundError without metrics.jsonl or config.yaml, and ValueError without a seed in config.yaml.
    """
    config_file, records = run_dir / "config.yaml", read_records(run_dir)
    if not config_file.exists():
        raise FileNotFoundError(f"{config_file} does not exist; name the folder of a run (its run.dir)")
    try:
        config = read_mapping(config_file)
        seed = int(config["run"]["seed"])
        data_seed = int(seed if config["data"].get("seed") is None else config["data"]["seed"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{config_file} has no run.seed, or one that is not a number") from error
    validations = [record for record in records if record["kind"] == "validation" and record["losses"]]
    losses: dict[int, dict[str, float]] = {}
    last, problem = 0, "not yet validated"
    for record in validations:
        measured = record["losses"]
        if all(isinstance(loss, int | float) and 0 < loss < math.inf for loss in measured.values()):
            losses[record["tokens"]] = measured | {MEAN: float(np.mean(list(measured.values())))}
            last, problem = record["step"], ""
        else:
            problem = f"its held-out loss after {short_tokens(record['tokens'])} tokens is not finite and positive"
    starts = [record for record in records if record["kind"] == "run"]
    steps = starts[-1].get("steps") if starts else None
    if not problem and steps is not None and last != steps:
        problem = f"not finished, last validated after {short_tokens(max(losses))} tokens"
    start, trunk = _start(starts)
    seeds = Pair(f"seed {seed}", data_seed)
    return HeldOut(
        folder=run_dir.resolve(),
        seed=seed,
        pair=Pair(start, data_seed) if start else seeds,
        losses=losses,
        trunk=trunk,
        from_scratch=seeds if _only_longer(run_dir, config, starts) else None,
        steps=steps,
        final=None if problem else max(losses),
        problem=problem,
        settings=settings_of(config),
    )


def _start(starts: Sequence[Mapping[str, Any]]) -> tuple[str | None, Path | None]:
    """The checkpoint that a run with these `run` records began from, identified by its content, and the folder of the
    trunk if the run took its complete state. (None, None) if it began from scratch."""
    for how in ("origin", "initialized_from"):
        for origin in (start.get(how) for start in starts):
            if isinstance(origin, Mapping):
                path = Path(str(origin.get("path", "")))
                digest = origin.get("contents_sha256") or origin.get("manifest_sha256") or path
                run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
                return f"{how} step {origin.get('step')} ({str(digest)[:12]})", run if how == "origin" else None
    return None, None


def _only_longer(run_dir: Path, config: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run has the same steps as a run from scratch: it is one, or it began from a checkpoint before the decay
    of such a run, with the same seed, recipe and settings except the number of steps. The trunk may have been moved
    together with the run."""
    start, trunk = _start(starts)
    if start is None or trunk is None:
        return start is None
    folder = trunk if trunk.exists() else run_dir.parent / trunk.name
    if not ((folder / "config.yaml").exists() and (folder / METRICS_FILE).exists()):
        return False
    theirs = read_mapping(folder / "config.yaml")
    before = [record for record in read_records(folder) if record["kind"] == "run"]
    if not before or not before[0]["step"] < starts[0]["step"] < (before[-1].get("decay_start") or 0):
        return False

    def compared(of: Mapping[str, Any]) -> tuple[Any, ...]:
        return settings_of(of) | {"train.steps": 0}, of.get("precision"), of["run"]["seed"]

    return compared(config) == compared(theirs) and _only_longer(folder, theirs, before)


def configs_of(groups: Groups, configs: Path) -> dict[str, Config]:
    """The configuration of the first run of each group. Raises ConfigError for one that cannot be composed."""
    files = {name: runs[0].folder / "config.yaml" for name, runs in groups.items()}
    return {name: config_from_saved(read_mapping(file), [], configs, opens_data=False) for name, file in files.items()}


def partners(run: HeldOut, base: Sequence[HeldOut], groups: Groups) -> list[HeldOut]:
    """The partners of `run`: the runs of `base` with the same start and data (if some also have its seed, only those).
    If there are none: its trunk if that is in `base`, otherwise the partners of its trunk, otherwise the runs of `base`
    with the same steps as `run` from scratch."""
    visited: list[HeldOut] = []
    current: HeldOut | None = run
    while current is not None and current not in visited:  # the names of folders may form a cycle
        if same_start := [other for other in base if other.pair == current.pair]:
            return [other for other in same_start if other.seed == current.seed] or same_start
        visited.append(current)
        current = _trunk(current, groups)
        if current is not None and current in base:
            return [current]
    return [other for other in base if (other.from_scratch, other.steps) == (run.pair, run.steps)]


def _trunk(run: HeldOut, groups: Groups) -> HeldOut | None:
    """The run in `groups` that `run` is a branch of, if it has the same number of steps (so the same learning rates)
    and the same order of data. It is found by its folder, or, if folders were moved, by its name if that is unique."""
    if run.trunk is None:
        return None
    others = [other for runs in groups.values() for other in runs if other != run]
    fitting = [o for o in others if o.pair.data_seed == run.pair.data_seed and o.steps == run.steps]
    for other in fitting:
        if other.folder == run.trunk:
            return other
    named = [other for other in fitting if other.name == run.trunk.name]
    return named[0] if len(named) == 1 else None


def gaps(groups: Groups, base: str) -> pd.DataFrame:
    """Gaps to the group `base`: a row for each group, source (and MEAN), number of tokens and pair, with the gap in
    `percent` of the base's loss and in `nats` per token, and whether it is `final` (both runs are finished).

    Runs with the same partner share its noise, so they are averaged into one row. Raises ValueError if partners were
    validated on different sources.
    """
    rows = []
    for name, run in _others(groups, base):
        for tokens, measured in run.losses.items():
            found = [other for other in partners(run, groups[base], groups) if tokens in other.losses]
            for other in found:
                if other.losses[tokens].keys() != measured.keys():
                    raise ValueError(
                        f"after {short_tokens(tokens)} tokens {run.name} and {other.name} were validated on different "
                        "sources; compare runs with the same data.validation"
                    )
            final = run.final == tokens and any(other.final == tokens for other in found)
            for source, loss in measured.items() if found else ():
                of_base = float(np.mean([other.losses[tokens][source] for other in found]))
                key = name, source, tokens, found[0].pair, final
                rows.append((*key, 100 * (loss / of_base - 1), loss - of_base))
    keys = ["group", "source", "tokens", "pair", "final"]
    return pd.DataFrame(rows, columns=[*keys, "percent", "nats"]).groupby(keys, as_index=False, sort=False).mean()


def _others(groups: Groups, base: str) -> Iterator[tuple[str, HeldOut]]:
    return ((name, run) for name, runs in groups.items() if name != base for run in runs)


def _wide(found: pd.DataFrame, source: str = MEAN, column: str = "percent") -> pd.DataFrame:
    """The gaps with a column for each group and a row for each pair."""
    of_source = found[found["source"] == source]
    return of_source.pivot_table(index=["tokens", "pair"], columns="group", values=column)


def _noise(groups: Groups, base: str) -> pd.DataFrame:
    """Over the runs of the base, by tokens: the `mean` loss, the standard deviation in `percent` of it, the `count`."""
    losses = [(tokens, of[MEAN]) for run in groups[base] for tokens, of in run.losses.items()]
    table = pd.DataFrame(losses, columns=["tokens", "loss"]).groupby("tokens")["loss"].agg(["mean", "std", "count"])
    return table.assign(percent=100 * table["std"] / table["mean"])


def curve_of(runs: Sequence[HeldOut], parameters: float, base: Sequence[HeldOut] = ()) -> Curve:
    """The curve fitted to the last held-out losses of finished BF16 runs of at least four lengths. The lengths are
    their tokens over `parameters`.

    base: the runs whose losses it will be used for. Raises ValueError if one of `runs` is not finished, if any of all
    runs were validated on different sources, and what `fit` raises.
    """
    ends = [(run.final, run.losses[run.final]) for run in runs if run.final is not None]
    if left := next((run for run in runs if run.final is None), None):
        raise ValueError(f"--curve {left.folder}: {left.problem}; leave it out")
    validated = [measured for _, measured in ends] + [run.losses[run.final] for run in base if run.final is not None]
    sources = list(dict.fromkeys(", ".join(sorted(of.keys() - {MEAN})) for of in validated))
    if len(sources) > 1:
        raise ValueError(
            f"--curve: runs were validated on different sources ({' or '.join(sources)}); name runs with the same"
        )
    tokens, losses = [end / parameters for end, _ in ends], [measured[MEAN] for _, measured in ends]
    curve = fit(f"{counted(len(runs), 'run')} of yours", parameters, tokens, losses)
    off = max(abs(curve.loss(length) - loss) for length, loss in zip(tokens, losses, strict=True))
    return replace(curve, name=f"{curve.name}, all within {off:.4f} nats of it")


def of_another_curve(runs: Sequence[HeldOut], settings: Mapping[str, Any], whose: str) -> str:
    """A warning if the `runs` of a curve have another model or text than `settings` of `whose`; else empty."""
    unlike = dict.fromkeys(of for run in runs for of in differences(run.settings, settings))
    other = [of for of in unlike if of.startswith(("model.", "data.kind", "data.sources"))]
    return f"--curve: its runs differ from {whose} in model or text: {', '.join(other)}\n" if other else ""


def recipes_tables(
    groups: Groups, against: str | None = None, curve: Curve | None = None, times: Mapping[str, float] | None = None
) -> str:
    """Markdown tables of the gaps to the first group: by tokens, at the end, and by held-out source.

    against: also compare with this group. curve: from `curve_of` with `parameters` of a million, to express gaps at the
    end in tokens. times: planned time per token of each group, over the first group's; needs `curve`. Raises ValueError
    if there is no group `against`, no pair, or a group whose runs end after different numbers of tokens.
    """
    base, *others = groups
    if against is not None and against not in groups:
        raise ValueError(f"--against {against}: no group has this name; the groups are {', '.join(groups)}")
    found = gaps(groups, base)
    if found.empty:
        pairs = sorted({run.pair for runs in groups.values() for run in runs})
        starts = "; ".join(f"{pair.start}, data of seed {pair.data_seed}" for pair in pairs)
        raise ValueError(
            "no pair: two runs must have the same start (or name also the trunk of a branch), read the same data in "
            f"the same order, and be validated after the same number of tokens; starts: {starts}"
        )
    for name, of in found[found["final"]].groupby("group")["tokens"]:
        if of.nunique() > 1:
            ends = " and ".join(short_tokens(int(tokens)) for tokens in sorted(of.unique()))
            raise ValueError(f"{name}: its runs end after {ends} tokens; name a group for each length")
    against = None if against == base else against
    parts = [_by_tokens(groups, base, found), _at_the_end(groups, base, against, found, curve, times)]
    sources, ends = [source for source in found["source"].unique() if source != MEAN], found[found["final"]]
    if len(sources) > 1 and not ends.empty:
        by_source = [estimates(_wide(ends, source)) for source in sources]
        rows = [[name, *(gap_text(of.get(name)) for of in by_source)] for name in others]
        parts.append(markdown([f"recipe above {base}", *sources], rows))
    return "\n\n".join(parts)


def _by_tokens(groups: Groups, base: str, found: pd.DataFrame) -> str:
    others = [name for name in groups if name != base]
    rows = []
    for tokens, noise in _noise(groups, base).iterrows():
        above = estimates(_wide(found[found["tokens"] == tokens]))
        cells = [f"{gap_text(above[name])} ({above[name].count})" if name in above else "-" for name in others]
        deviation = "-" if np.isnan(noise["percent"]) else f"{noise['percent']:.2f}%"
        rows.append([short_tokens(int(tokens)), f"{noise['mean']:.4f} ({noise['count']:.0f})", deviation, *cells])
    notes = [
        difference_line(f"{run.name} ({name})", other.name, unlike)
        for name, run in _others(groups, base)
        for other in partners(run, groups[base], groups)[:1]
        if (unlike := differences(run.settings, other.settings))
    ]
    return markdown(["tokens", base, "standard deviation", *(f"{name} above it" for name in others)], rows, notes)


def _at_the_end(
    groups: Groups,
    base: str,
    against: str | None,
    found: pd.DataFrame,
    curve: Curve | None,
    times: Mapping[str, float] | None,
) -> str:
    ends = found[found["final"]]
    wide, heads = _wide(ends), ["recipe", "loss at the end", "pairs", f"above {base}", "nats per token"]
    percent, nats, beside = estimates(wide), estimates(_wide(ends, column="nats")), {}
    if curve is not None:
        heads += [f"tokens for the loss of {base}", *(["time of a token", "cost"] if times else [])]
    if against is not None:
        heads += [f"above {against}", f"share of the gap of {against}"]
        to_against = gaps(groups, against)
        beside = estimates(_wide(to_against[to_against["final"]]))
    rows = []
    for name, runs in groups.items():
        last = [(run.final, run.losses[run.final][MEAN]) for run in runs if run.final is not None]
        lengths = {tokens for tokens, _ in last}
        mean = f"{np.mean([loss for _, loss in last]):.4f} " if len(lengths) == 1 else ""
        cells = [name, f"{mean}({len(last)})"]
        cells.append(str(percent[name].count) if name in percent else "-")
        cells.append(gap_text(percent.get(name)))
        cells.append(gap_text(nats.get(name), "", 4))
        if curve is not None:
            priced, millions = name in nats and len(lengths) == 1, max(lengths, default=0) / curve.parameters
            cells.append(curve.price_text(nats[name], millions) if priced else "-")
            if times is not None:
                cost = curve.price_text(nats[name], millions, times[name]) if priced else "-"
                cells += [f"{times[name]:.2f}", cost]
        cells += [] if against is None else [gap_text(beside.get(name)), share_text(wide, name, against)]
        rows.append(cells)
    notes = [
        "[95% interval]: of the mean over pairs (Student's t); for one or two of twenty recipes without a cost, it "
        "does not contain zero. *: of fewer than five pairs, with the pooled variance of all groups, as if it were "
        "equal for all.",
        *([] if against is None else [f"share of the gap of {against}: ± is one standard error."]),
        *_notes_of_prices(base, ends, curve, times),
        *(f"left out: {line}" for line in _left_out(groups, base)),
    ]
    return markdown(heads, rows, notes)


def _notes_of_prices(
    base: str, ends: pd.DataFrame, curve: Curve | None, times: Mapping[str, float] | None
) -> Iterator[str]:
    if curve is not None and not ends.empty:
        far = curve.far_from(ends["tokens"].max() / curve.parameters)
        yield (
            f"tokens for the loss of {base}: over its own, by the curve of {curve}, D in millions; the error of the "
            f"curve is not included{far and f', and {far}'}."
        )
    if times is not None:
        yield (
            f"time of a token: over that of {base}, planned, not measured, without an interval. cost: tokens times "
            "time; below 1 a recipe pays; if intervals overlap, it is not certain which costs less."
        )


def _left_out(groups: Groups, base: str) -> Iterator[str]:
    """The runs that are in no pair of finished runs, with the reason."""
    for name, run in [*((base, run) for run in groups[base]), *_others(groups, base)]:
        if run.problem:
            yield f"{run.name} ({name}): {run.problem}"
        elif name != base and run.final not in [other.final for other in partners(run, groups[base], groups)]:
            wanted = f"the same start ({run.pair.start}), data and length"
            yield f"{run.name} ({name}): no finished run of {base} has {wanted}"


def draw_at_the_end(groups: Groups, target: Path, against: str | None = None) -> Path:
    """Draw the gaps of finished runs to the first group, the smallest on top, with a dotted line at the gap of
    `against`; returns `target`. Raises ValueError if there is no pair of finished runs."""
    base = next(iter(groups))
    found = gaps(groups, base)
    wide = _wide(found[found["final"]])
    rows = {name: (of, list(wide[name].dropna())) for name, of in estimates(wide).items()}
    ends = [run.losses[run.final][MEAN] for run in groups[base] if run.final is not None]
    noise = pooled([[100 * loss / float(np.mean(ends)) for loss in ends]])
    return draw_estimates(
        rows,
        target,
        f"held-out loss above {base} at the end (%)",
        against=against,
        noise=None if noise is None else (f"{base}: one standard deviation of its runs", noise.deviation),
    )
