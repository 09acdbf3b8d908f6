"""What a recipe costs, over several seeds or branches: each run against its partner of the base, with standard errors.

`held_out.py` says which runs are partners. Seeds and starts say how far the noise goes that recipes add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from analysis.held_out import HeldOut, Pair, runs_of, sources_note
from analysis.noise import Spread, spread
from megatron_fp4.logging.other_settings import difference_line, differences
from megatron_fp4.logging.picture import BLACK, INK, legend_below, look, open_frame, picture
from megatron_fp4.logging.words import counted, short_tokens


class NoPairError(ValueError):
    """Of no run of a group is there a partner."""


class Gap(NamedTuple):
    """A loss above that of the base: in percent of it, and in nats per token."""

    percent: float
    nats: float


def partners(run: HeldOut, base: Sequence[HeldOut], compared: Sequence[HeldOut] = ()) -> list[HeldOut]:
    """The runs of `base` that began as `run` did and read the same; of these those of its own seed, if there are any
    (branches from one checkpoint may differ in the seed of their rounding). If there are none, the trunk of `run`,
    which went on itself, if it is in `base`; else the partners of its trunk, which `run` was up to its start.

    compared: all runs that are, among which to look for a trunk that is not in `base`. What is returned has one `Pair`.
    """
    passed: list[HeldOut] = []
    one: HeldOut | None = run
    while one is not None and one not in passed:  # names of folders may lead in a circle
        alike = [other for other in base if other.pair == one.pair]
        if alike:
            return [other for other in alike if other.seed == one.seed] or alike
        passed.append(one)
        one = trunk_of(one, base, compared)
        if one is not None and one in base:
            return [one]
    return []


def trunk_of(run: HeldOut, base: Sequence[HeldOut], compared: Sequence[HeldOut] = ()) -> HeldOut | None:
    """The run that `run` is a branch of, if it has the same number of steps, and so the same learning rates, and the
    same order of the data: the one in the folder of the trunk, else the only one of its name in `base`, else among all
    `compared`. If it is not there, the trunk of another run of the same start, which was the same run up to there."""
    if run.trunk is None:
        return None
    data_seed = run.pair.data_seed
    fits = [
        [o for o in group if o != run and o.pair.data_seed == data_seed and o.steps == run.steps]
        for group in (base, compared)
    ]
    alike = [o.trunk for o in (*base, *compared) if o.trunk is not None and o.start == run.start]
    for trunk in dict.fromkeys((run.trunk, *alike)):
        if (found := _in_folder(trunk, fits)) is not None:
            return found
    return None


def _in_folder(trunk: str, groups: Sequence[Sequence[HeldOut]]) -> HeldOut | None:
    for group in groups:
        for other in group:
            if other.folder == trunk:
                return other
    for group in groups:  # folders may have come here from another machine
        named = [other for other in group if other.name == Path(trunk).name]
        if len(named) == 1:
            return named[0]
    return None


def gaps(
    runs: Sequence[HeldOut],
    base: Sequence[HeldOut],
    losses: Callable[[HeldOut], Mapping[int, float]] = lambda run: run.losses,
    compared: Sequence[HeldOut] = (),
) -> dict[int, dict[Pair, Gap]]:
    """Tokens -> pair -> loss above the base, where both were measured: a number for each start and order of the data of
    the base's runs. Runs that share a partner share its noise: they count as one, their mean.

    losses: which losses of a run to compare, by tokens. compared: of `partners`. Raises ValueError if two runs of a
    group have the same start and the same seeds, or partners were validated on other sources, and NoPairError.
    """
    for group in (runs, base):
        seen: dict[tuple[Pair, int], str] = {}
        for run in group:
            if (key := (run.pair, run.seed)) in seen:
                raise ValueError(
                    f"{seen[key]} and {run.name} have the same start ({run.pair.start}), run.seed={run.seed} and "
                    f"data.seed={run.pair.data_seed}: name one run of each"
                )
            seen[key] = run.name
    every: dict[int, dict[Pair, list[Gap]]] = {}
    apart: str | None = None
    for run in runs:
        all_partners = partners(run, base, compared)
        for other in all_partners[:1]:
            of_both = _measured(losses(run)), _measured(losses(other))
            apart = apart or f"{run.name} {of_both[0]}, and its partner {other.name} {of_both[1]}"
        for tokens, loss in losses(run).items():
            found = [other for other in all_partners if tokens in losses(other)]
            for partner in found:
                _check_sources(run, partner, tokens)
            if measured := [losses(partner)[tokens] for partner in found]:
                of_base = mean(measured)
                gap = Gap(100 * (loss / of_base - 1), loss - of_base)
                every.setdefault(tokens, {}).setdefault(found[0].pair, []).append(gap)
    if not every and apart:
        raise NoPairError(
            f"no pair: {apart}; both must have been validated after equally many tokens (validation.interval, and as "
            "many tokens a step), with losses that are numbers"
        )
    if not every:
        starts = ["; ".join(sorted({_spelled(run.pair) for run in group})) for group in (runs, base)]
        raise NoPairError(
            f"no pair: the runs began with {starts[0]}, the base with {starts[1]}; both must have begun alike (or "
            "so must the run that a branch came from, named in a group, too), read the same data in the same order, "
            "and been validated after equally many tokens"
        )
    return {
        tokens: {
            pair: Gap(mean(gap.percent for gap in found), mean(gap.nats for gap in found)) for pair, found in at.items()
        }
        for tokens, at in sorted(every.items())
    }


def _measured(losses: Mapping[int, float]) -> str:
    """For a message: after how many tokens there is a loss."""
    if not losses:
        return "has no held-out loss yet"
    after = [short_tokens(tokens) for tokens in sorted(losses)]
    return f"has held-out losses after {', '.join(after[:3])}{' and more' if after[3:] else ''} tokens"


def _check_sources(run: HeldOut, partner: HeldOut, tokens: int) -> None:
    """The mean loss of some sources says nothing against that of others."""
    of_run, of_partner = (one.sources.get(tokens, {}) for one in (run, partner))
    if of_run.keys() != of_partner.keys():
        raise ValueError(
            f"after {short_tokens(tokens)} tokens {run.name} was validated on {', '.join(of_run)} and {partner.name} "
            f"on {', '.join(of_partner)}: compare runs of the same data.validation, or --sources that both have"
        )


def gaps_of_groups(groups: Mapping[str, Sequence[HeldOut]]) -> dict[str, dict[int, dict[Pair, Gap]]]:
    """`gaps` to the first group of all others that have a pair. Raises NoPairError if none has."""
    base, *others = groups
    compared = runs_of(groups)
    found, problem = {}, None
    for name in others:
        try:
            found[name] = gaps(groups[name], groups[base], compared=compared)
        except NoPairError as error:
            problem = problem or error
    if not found and problem is not None:
        raise problem
    return found


def unlike(groups: Mapping[str, Sequence[HeldOut]], names: Iterable[str] | None = None) -> list[str]:
    """A line for each run that differs from its partner of the first group in more than its recipe.

    names: of the groups to look at (default: all but the first).
    """
    base, *others = groups
    compared, lines = runs_of(groups), []
    for name in others if names is None else names:
        for run in groups[name]:
            for partner in partners(run, groups[base], compared)[:1]:
                if found := differences(run.settings, partner.settings):
                    lines.append(difference_line(f"{run.name} ({name})", partner.name, found))
    return lines


def notes_below(groups: Mapping[str, Sequence[HeldOut]], names: Iterable[str] | None = None) -> list[str]:
    """What is to stand below a table of `groups`: `sources_note`, and `unlike` of `names`."""
    note = sources_note(groups)
    return [*([note] if note else []), *unlike(groups, names)]


def _spelled(pair: Pair) -> str:
    return pair.start if pair.start == f"seed {pair.data_seed}" else f"{pair.start}, data seed {pair.data_seed}"


def table(groups: Mapping[str, Sequence[HeldOut]]) -> str:
    """Markdown; the first group is the base. A row for each number of tokens that the base was measured after.

    Raises NoPairError if no group has a pair.
    """
    base_name, *others = groups
    base, gap_of = groups[base_name], gaps_of_groups(groups)
    lines = [
        f"| tokens | {base_name} | standard deviation | " + " | ".join(f"{name} above it" for name in others) + " |",
        "|---|---|---|" + "---|" * len(others),
    ]
    for tokens in sorted({tokens for run in base for tokens in run.losses}):
        of_base = spread([run.losses[tokens] for run in base if tokens in run.losses])
        cells = [
            short_tokens(tokens),
            f"{of_base.mean:.4f} ({of_base.count})",
            "-" if of_base.deviation is None else f"{100 * of_base.deviation / of_base.mean:.2f}%",
        ]
        for name in others:
            at = gap_of.get(name, {}).get(tokens)
            cells.append("-" if at is None else _cell(spread([gap.percent for gap in at.values()])))
        lines.append("| " + " | ".join(cells) + " |")
    if notes := notes_below(groups):
        lines += ["", *notes]
    return "\n".join(lines)


def _cell(gap: Spread) -> str:
    error = "" if gap.error is None else f" ± {gap.error:.2f}"
    return f"{gap.mean:+.2f}%{error} ({gap.count})"


def draw(groups: Mapping[str, Sequence[HeldOut]], target: str | Path) -> Path:
    """Gaps over tokens: the mean with its standard error, and each pair as a dot; returns `target`.

    The band is the standard deviation of the base over its runs: what seeds and starts alone do.
    """
    base_name, *others = groups
    base, target = groups[base_name], Path(target)
    with picture(target, 1, 1, figsize=(9, 5.2), dpi=150) as (figure, axes):
        width = {
            tokens: [run.losses[tokens] for run in base if tokens in run.losses]
            for tokens in sorted({tokens for run in base for tokens in run.losses})
        }
        noise = {tokens: spread(losses) for tokens, losses in width.items() if len(losses) > 1}
        if noise:
            edge = [100 * (s.deviation or 0.0) / s.mean for s in noise.values()]
            axes.fill_between(
                [t / 1e6 for t in noise], [-e for e in edge], edge, color=BLACK, alpha=0.07, linewidth=0,
                label=f"{base_name}: one standard deviation over its runs",
            )  # fmt: skip
        axes.axhline(0, color=INK, linewidth=1.0)
        for name, found in gaps_of_groups(groups).items():
            style = look(1 + others.index(name))
            by_tokens = {tokens: [gap.percent for gap in at.values()] for tokens, at in found.items()}
            means = {tokens: spread(at) for tokens, at in by_tokens.items()}
            count = max(s.count for s in means.values())
            axes.errorbar(
                [t / 1e6 for t in means], [s.mean for s in means.values()], [s.error or 0.0 for s in means.values()],
                capsize=4 if count > 1 else 0, **style.points(linewidth=1.5),
                label=f"{name}, {counted(count, 'pair')}",
            )  # fmt: skip
            if count > 1:
                for tokens, at in by_tokens.items():
                    axes.plot(
                        [tokens / 1e6] * len(at), at, color=style.color, linestyle="none", marker=style.marker,
                        markersize=3, alpha=0.5,
                    )  # fmt: skip
        axes.set_xlabel("tokens (millions)")
        axes.set_ylabel(f"held-out loss above {base_name} of the same start (%)")
        if note := sources_note(groups):
            axes.set_title(note, fontsize=9.5, wrap=True)
        open_frame(axes)
        legend_below(figure, axes)
    return target
