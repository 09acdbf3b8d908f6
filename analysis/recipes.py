"""What recipes cost over several seeds or branches: each run against its partner of the base.

Two runs are partners if they began alike and read the same tokens in the same order; what differs between them is the
recipe, and how its noise grows. A run from scratch begins with the weights of its `run.seed`; a branch with a
checkpoint of another run, and its own seed is that of stochastic rounding. Equal checkpoints are one start, whichever
run saved them. A branch without a partner has the partners of its trunk, the run whose checkpoint it began from. A run
from scratch without one has a branch of the base that only made its trunk longer, as those of a curve do.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from analysis.price import Curve, fit
from analysis.runs import comparable, difference_line, differences, settings_of
from analysis.statistics import draw_estimates, estimates, gap_text, pooled, share_text
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.console import counted, markdown, short_tokens
from megatron_fp4.logging.files import METRICS_FILE
from megatron_fp4.logging.run_folder import read_records

MEAN = ""  # instead of a held-out source: the mean of all, each weighed alike


class Pair(NamedTuple):
    """What partners have in common. start: `seed 1`, or a checkpoint. data_seed: of the order of the data."""

    start: str
    data_seed: int


@dataclass(frozen=True)
class HeldOut:
    """Held-out losses of one run.

    losses: by tokens trained on and source (and MEAN), nats per token. trunk: of a branch, the folder of the run whose
    checkpoint it began from. whole: the pair of the run from scratch that has the same steps. steps: how many the run
    is to have. final: tokens of its last validation if the run is finished. problem: why it is not in the comparison of
    the ends. settings: besides the recipe.
    """

    folder: Path
    seed: int
    pair: Pair
    losses: dict[int, dict[str, float]]
    trunk: Path | None = None
    whole: Pair | None = None
    steps: int | None = None
    final: int | None = None
    problem: str = ""
    settings: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """For messages."""
        return self.folder.name


Groups = Mapping[str, Sequence[HeldOut]]


def read_groups(arguments: Sequence[str]) -> dict[str, list[HeldOut]]:
    """Groups of runs from `NAME=RUN,RUN,...`, in their order; a RUN is a folder or a pattern of folders.

    Raises ValueError for an argument of another form, a name or a run that comes twice, or fewer than two groups, and
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
                raise ValueError(f"{text}: no folder has such a name; name the folders of runs of {name}")
            for folder in map(Path, folders):
                if (resolved := folder.resolve()) in seen:
                    raise ValueError(f"{argument}: {folder} is in {seen[resolved]} already; name each run once")
                seen[resolved] = name
                groups[name].append(read_held_out(folder))
    if len(groups) < 2:
        raise ValueError("name two groups at least, the base first")
    for runs in groups.values():
        for run in runs:
            if twin := next((o for o in runs if o is not run and (o.pair, o.seed) == (run.pair, run.seed)), None):
                raise ValueError(f"{run.name} and {twin.name} have the same start and seeds; name one run of each")
    return groups


def read_held_out(run_dir: Path) -> HeldOut:
    """The run in `run_dir`, finished or not.

    Raises FileNotFoundError if there is no metrics.jsonl or no config.yaml, and ValueError if the seed is not in
    config.yaml.
    """
    config_file, records = run_dir / "config.yaml", read_records(run_dir)
    if not config_file.exists():
        raise FileNotFoundError(f"{config_file} does not exist; name the folder of a run (its run.dir)")
    try:
        config = yaml.safe_load(config_file.read_text())
        seed = int(config["run"]["seed"])
        data_seed = int(seed if config["data"].get("seed") is None else config["data"]["seed"])
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{config_file} names no run.seed, or one that is no number") from error
    validations = [record for record in records if record["kind"] == "validation" and record["losses"]]
    losses: dict[int, dict[str, float]] = {}
    last, problem = 0, "not yet validated"
    for record in validations:
        measured = record["losses"]
        if all(map(comparable, measured.values())):
            losses[record["tokens"]] = measured | {MEAN: float(np.mean(list(measured.values())))}
            last, problem = record["step"], ""
        else:
            problem = f"its held-out loss after {short_tokens(record['tokens'])} tokens is no number to compare"
    starts = [record for record in records if record["kind"] == "run"]
    steps = starts[-1].get("steps") if starts else None
    if not problem and steps is not None and last != steps:
        problem = f"not finished, last validated after {short_tokens(max(losses))} tokens"
    start, trunk = _start(starts)
    from_scratch = Pair(f"seed {seed}", data_seed)
    return HeldOut(
        folder=run_dir.resolve(),
        seed=seed,
        pair=Pair(start, data_seed) if start else from_scratch,
        losses=losses,
        trunk=trunk,
        whole=from_scratch if _only_longer(run_dir, config, starts) else None,
        steps=steps,
        final=None if problem else max(losses),
        problem=problem,
        settings=settings_of(config),
    )


def _start(starts: Sequence[Mapping[str, Any]]) -> tuple[str | None, Path | None]:
    """The checkpoint that a run with these `run` records began from, by its content; and if it took its whole state,
    the folder of the run that saved it. None, None if it began from nothing."""
    for how in ("origin", "initialized_from"):
        for origin in (start.get(how) for start in starts):
            if isinstance(origin, Mapping):
                path = Path(str(origin.get("path", "")))
                digest = origin.get("contents_sha256") or origin.get("manifest_sha256") or path
                run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
                return f"{how} step {origin.get('step')} ({str(digest)[:12]})", run if how == "origin" else None
    return None, None


def _only_longer(run_dir: Path, config: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run has the steps that it would have from scratch: it began there, or with a checkpoint of such a run,
    its trunk, of the same seed, recipe and settings but the number of steps, from before the decay. Folders may have
    been copied together."""
    start, trunk = _start(starts)
    if start is None or trunk is None:
        return start is None
    folder = trunk if trunk.exists() else run_dir.parent / trunk.name
    if not ((folder / "config.yaml").exists() and (folder / METRICS_FILE).exists()):
        return False
    theirs = yaml.safe_load((folder / "config.yaml").read_text())
    before = [record for record in read_records(folder) if record["kind"] == "run"]
    if not before or not before[0]["step"] < starts[0]["step"] < (before[-1].get("decay_start") or 0):
        return False
    mine, other = ((settings_of(of) | {"train.steps": 0}, of.get("precision"), of["run"]) for of in (config, theirs))
    return mine[:2] == other[:2] and mine[2]["seed"] == other[2]["seed"] and _only_longer(folder, theirs, before)


def configs_of(groups: Groups, configs: Path) -> dict[str, Config]:
    """By group, the configuration of its first run. Raises ConfigError for one that cannot be composed."""
    files = {name: runs[0].folder / "config.yaml" for name, runs in groups.items()}
    return {
        name: config_from_saved(yaml.safe_load(file.read_text()), [], configs, opens_data=False)
        for name, file in files.items()
    }


def partners(run: HeldOut, base: Sequence[HeldOut], groups: Groups) -> list[HeldOut]:
    """The runs of `base` that began as `run` did and read the same; of these those of its own seed, if there are any.
    If there are none: its trunk if that is in `base`, else the partners of its trunk, else branches that only made
    longer what began as `run` did."""
    passed: list[HeldOut] = []
    one: HeldOut | None = run
    while one is not None and one not in passed:  # names of folders may lead in a circle
        if alike := [other for other in base if other.pair == one.pair]:
            return [other for other in alike if other.seed == one.seed] or alike
        passed.append(one)
        one = _trunk(one, groups)
        if one is not None and one in base:
            return [one]
    return [other for other in base if (other.whole, other.steps) == (run.pair, run.steps)]


def _trunk(run: HeldOut, groups: Groups) -> HeldOut | None:
    """The run that `run` is a branch of, if it has as many steps, and so the same learning rates, and the same order of
    the data: in its folder, else (folders may have been copied) the only one of its name."""
    every = [other for runs in groups.values() for other in runs if other != run]
    fits = [o for o in every if o.pair.data_seed == run.pair.data_seed and o.steps == run.steps]
    here = [other for other in fits if other.folder == run.trunk]
    named = [other for other in fits if run.trunk is not None and other.name == run.trunk.name]
    return here[0] if here else named[0] if len(named) == 1 else None


def gaps(groups: Groups, base: str) -> pd.DataFrame:
    """Gaps to the group `base`: a row for each group, source (also MEAN), number of tokens and pair, with `percent` of
    the base's loss, `nats` per token, and whether it is `final`, of finished runs.

    Runs that share a partner share its noise: they are one row, their mean. Raises ValueError if partners were
    validated on other sources.
    """
    rows = []
    for name, run in _others(groups, base):
        for tokens, measured in run.losses.items():
            found = [other for other in partners(run, groups[base], groups) if tokens in other.losses]
            for other in found:
                if other.losses[tokens].keys() != measured.keys():
                    raise ValueError(
                        f"after {short_tokens(tokens)} tokens {run.name} and {other.name} were validated on other "
                        "sources; compare runs of the same data.validation"
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
    """A column for each group, a row for each pair."""
    of_source = found[found["source"] == source]
    return of_source.pivot(index=["tokens", "pair"], columns="group", values=column)


def _noise(groups: Groups, base: str) -> pd.DataFrame:
    """Of the base over its runs, by tokens: the `mean` loss, the standard deviation in `percent` of it, the `count`."""
    losses = [(tokens, of[MEAN]) for run in groups[base] for tokens, of in run.losses.items()]
    table = pd.DataFrame(losses, columns=["tokens", "loss"]).groupby("tokens")["loss"].agg(["mean", "std", "count"])
    return table.assign(percent=100 * table["std"] / table["mean"])


def curve_of(runs: Sequence[HeldOut], parameters: float, base: Sequence[HeldOut] = ()) -> Curve:
    """Fitted to the last held-out losses of finished BF16 runs of at least four lengths, over their tokens by
    `parameters`.

    base: runs with the losses that it is for. Raises ValueError for one of `runs` that is not finished, if any two of
    all were validated on other sources, and what `fit` raises.
    """
    ends = [(run.final, run.losses[run.final]) for run in runs if run.final is not None]
    if left := next((run for run in runs if run.final is None), None):
        raise ValueError(f"--curve {left.folder}: {left.problem}; leave it out")
    validated = [measured for _, measured in ends] + [run.losses[run.final] for run in base if run.final is not None]
    sources = list(dict.fromkeys(", ".join(sorted(of.keys() - {MEAN})) for of in validated))
    if len(sources) > 1:
        raise ValueError(
            f"--curve: runs were validated on other sources ({' or '.join(sources)}); name runs of the same"
        )
    tokens, losses = [end / parameters for end, _ in ends], [measured[MEAN] for _, measured in ends]
    curve = fit(f"{counted(len(runs), 'run')} of yours", parameters, tokens, losses)
    off = max(abs(curve.loss(length) - loss) for length, loss in zip(tokens, losses, strict=True))
    return replace(curve, name=f"{curve.name}, all within {off:.4f} nats of it")


def of_another_curve(runs: Sequence[HeldOut], settings: Mapping[str, Any], whose: str) -> str:
    """A line if a curve's `runs` are of another model or text than `settings`, which are `whose`; else empty."""
    unlike = dict.fromkeys(of for run in runs for of in differences(run.settings, settings))
    other = [of for of in unlike if of.startswith(("model.", "data.kind", "data.sources"))]
    return f"--curve: another model or text than {whose}; prices are for those: {', '.join(other)}\n" if other else ""


def recipes_tables(
    groups: Groups, against: str | None = None, curve: Curve | None = None, times: Mapping[str, float] | None = None
) -> str:
    """Markdown: gaps to the first group by tokens trained on, at the end, and by held-out source.

    against: another group to tell differences to. curve: `curve_of` by millions, for the gaps at the end in tokens.
    times: of a token by group, planned, over the first group's; needs `curve`. Raises ValueError if no group has this
    name, or none has a pair.
    """
    base, *others = groups
    if against is not None and against not in groups:
        raise ValueError(f"--against {against}: no group has this name; the groups are {', '.join(groups)}")
    found = gaps(groups, base)
    if found.empty:
        pairs = sorted({run.pair for runs in groups.values() for run in runs})
        starts = "; ".join(f"{pair.start}, data of seed {pair.data_seed}" for pair in pairs)
        raise ValueError(
            "no pair: both runs must have begun alike (or the run that a branch came from is named, too), read the "
            f"same data in the same order, and been validated after equally many tokens; starts: {starts}"
        )
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
        finished = [run for run in runs if run.final is not None]
        lengths = {run.final for run in finished if run.final is not None}
        mean = f"{np.mean([run.losses[run.final][MEAN] for run in finished]):.4f} " if finished else ""  # type: ignore[index]
        cells = [name, f"{mean if len(lengths) == 1 else ''}({len(finished)})"]
        cells += [str(percent[name].count) if name in percent else "-", gap_text(percent.get(name))]
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
        "[95% interval]: of the mean over pairs (Student's t); of twenty recipes that cost nothing, one or two are "
        "expected without zero. *: of fewer than five pairs, by the scatter within all groups, pooled, as if they "
        "scattered alike.",
        *([] if against is None else [f"share of the gap of {against}: ± is one standard error."]),
        *_notes_of_prices(base, ends, curve, times),
        *(f"left out: {line}" for line in _left_out(groups, base)),
    ]
    return markdown(heads, rows, notes)


def _notes_of_prices(
    base: str, ends: pd.DataFrame, curve: Curve | None, times: Mapping[str, float] | None
) -> Iterator[str]:
    if curve is not None and not ends.empty:
        caution = curve.caution(ends["tokens"].max() / curve.parameters)
        yield f"tokens for the loss of {base}: over its own, by the curve of {curve}, D in millions; {caution}."
    if times is not None:
        yield (
            f"time of a token: over that of {base}, planned, not measured, without an interval. cost: tokens times "
            "time; below 1 a recipe pays; where intervals overlap, it is not established which costs less."
        )


def _left_out(groups: Groups, base: str) -> Iterator[str]:
    """Runs that are in no pair of finished runs, and why."""
    for name, run in [*((base, run) for run in groups[base]), *_others(groups, base)]:
        if run.problem:
            yield f"{run.name} ({name}): {run.problem}"
        elif name != base and run.final not in [other.final for other in partners(run, groups[base], groups)]:
            yield f"{run.name} ({name}): no finished run of {base} has its start ({run.pair.start}), data and length"


def draw_at_the_end(groups: Groups, target: Path, against: str | None = None) -> Path:
    """Gaps of finished runs to the first group, smallest on top, with a dotted line at that of `against`; returns
    `target`. Raises ValueError if there is no pair of finished runs."""
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
