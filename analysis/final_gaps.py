"""What recipes cost at the end of their runs, and which differences are more than noise: a table, and a figure.

A gap is of a pair of finished runs (`held_out.py`) that were validated after equally many tokens. Groups of fewer
than five pairs have their standard error from the standard deviation within all groups, pooled (`noise.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from analysis.gap_picture import Row, Words, draw_rows
from analysis.held_out import HeldOut, Pair, runs_of, sources_note
from analysis.noise import (
    Estimate,
    Pooled,
    beyond_cell,
    estimate,
    nats_cell,
    percent_cell,
    pooled,
    share_cell,
    share_of,
)
from analysis.paired import Gap, NoPairError, gaps, partners, trunk_of
from megatron_fp4.logging.words import counted, short_tokens

Groups = Mapping[str, Sequence[HeldOut]]
Losses = Callable[[HeldOut], Mapping[int, float]]
_NO_PAIR = "no finished run has a finished partner in {base}, so nothing can be said of the end"


def final(run: HeldOut) -> dict[int, float]:
    """The last loss of a finished run, by tokens."""
    return run.final_losses


def final_of(source: str) -> Losses:
    """The same of one held-out source."""
    return lambda run: {t: run.sources[t][source] for t in run.final_losses if source in run.sources.get(t, {})}


@dataclass(frozen=True)
class FinalGaps:
    """The last losses of all groups above those of one of them, `base`, pair by pair."""

    groups: Groups
    base: str
    losses: Losses = final

    @cached_property
    def compared(self) -> list[HeldOut]:
        """The runs of all groups."""
        return runs_of(self.groups)

    @cached_property
    def pairs(self) -> dict[str, dict[tuple[int, Pair], Gap]]:
        """Of each other group, by tokens and pair; empty where it has no pair with the base."""
        found: dict[str, dict[tuple[int, Pair], Gap]] = {}
        for name, runs in self.groups.items():
            if name != self.base:
                try:
                    by_tokens = gaps(runs, self.groups[self.base], self.losses, self.compared)
                except NoPairError:
                    by_tokens = {}
                found[name] = {(tokens, pair): gap for tokens, at in by_tokens.items() for pair, gap in at.items()}
        return found

    @cached_property
    def gaps(self) -> dict[str, list[Gap]]:
        """The same without what they are of."""
        return {name: [*of_group.values()] for name, of_group in self.pairs.items()}

    def share(self, name: str, other: str) -> Estimate | None:
        """Of the gap of group `other`, in percent of the base's loss, that group `name` has; see `share_of`."""
        mine, others = ({key: gap.percent for key, gap in self.pairs[group].items()} for group in (name, other))
        return share_of(mine, others, self.percent.get(other))

    @cached_property
    def shared(self) -> Pooled | None:
        """The standard deviation of gaps within groups, in percent."""
        return pooled([gap.percent for gap in of_group] for of_group in self.gaps.values())

    @cached_property
    def percent(self) -> dict[str, Estimate]:
        """Of each group with a pair: its mean gap in percent of the base's loss."""
        return {
            name: estimate([gap.percent for gap in of_group], self.shared)
            for name, of_group in self.gaps.items()
            if of_group
        }

    @cached_property
    def nats(self) -> dict[str, Estimate]:
        """The same in nats per token."""
        shared = pooled([gap.nats for gap in of_group] for of_group in self.gaps.values())
        return {
            name: estimate([gap.nats for gap in of_group], shared) for name, of_group in self.gaps.items() if of_group
        }

    def ends(self, group: str) -> dict[int, list[float]]:
        """The last losses of a group's finished runs, by tokens."""
        by_tokens: dict[int, list[float]] = {}
        for run in self.groups[group]:
            for tokens, loss in self.losses(run).items():
                by_tokens.setdefault(tokens, []).append(loss)
        return dict(sorted(by_tokens.items()))

    def noise(self, group: str) -> Pooled | None:
        """The standard deviation of these losses in percent of their mean, among those after equally many tokens."""
        by_tokens = self.ends(group)
        return pooled([100 * loss * len(losses) / sum(losses) for loss in losses] for losses in by_tokens.values())

    def left_out(self) -> list[str]:
        """Runs that are in no pair, and why."""
        lines, base = [], self.groups[self.base]
        for name, runs in self.groups.items():
            for run in runs:
                found = [] if name == self.base else partners(run, base, self.compared)
                if run.lost is not None:
                    why = f"its held-out loss after {short_tokens(run.lost)} tokens is no number to compare"
                elif run.final is None:
                    last = f"last validated after {short_tokens(max(run.losses))} tokens" if run.losses else ""
                    why = f"not finished, {last or 'and not yet validated'}"
                elif name != self.base and not any(other.final == run.final for other in found):
                    why = f"no finished run of {self.base} has its start ({run.pair.start}), data and length"
                    if not found and run.trunk is not None and trunk_of(run, base, self.compared) is None:
                        why += f"; named in a group, too, its trunk, {Path(run.trunk).name}, lends it its partners"
                else:
                    continue
                lines.append(f"{run.name} ({name}): {why}")
        return lines


def final_table(groups: Groups, against: str | None = None) -> str:
    """Markdown: each group's gap to the first one, in percent and nats, and to the group `against`; notes below.

    A line that says so if no finished runs make a pair. Raises ValueError if no group is called `against`.
    """
    base, of_base, of_other = next(iter(groups)), *_compared(groups, against)
    if not of_base.percent:
        return "\n".join([_NO_PAIR.format(base=base), *(f"left out: {line}" for line in of_base.left_out())])
    heads = ["recipe", "loss at the end", "pairs", f"above {base}", "nats per token", "beyond the noise"]
    if of_other is not None:
        heads += [f"above {against}", "beyond the noise", f"share of the gap of {against}"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name in groups:
        percent, nats = of_base.percent.get(name), of_base.nats.get(name)
        count = "-" if name == base else str(percent.count if percent else 0)
        cells = [name, _end(of_base, name), count, percent_cell(percent), nats_cell(nats), beyond_cell(percent)]
        if of_other is not None:
            difference = None if name == against else of_other.percent.get(name)
            share = None if name in (base, against) else of_base.share(name, of_other.base)
            cells += [percent_cell(difference), beyond_cell(difference), "1" if name == against else share_cell(share)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_notes(of_base, of_other)])


def source_table(groups: Groups) -> str | None:
    """Markdown: each group's gap to the first one by held-out source, in percent; None with a single source, or without
    a pair of finished runs."""
    base = next(iter(groups))
    measured = [at for runs in groups.values() for run in runs for at in run.sources.values()]
    sources = list(dict.fromkeys(source for at in measured for source in at))
    if len(sources) < 2 or not FinalGaps(groups, base).percent:
        return None
    by_source = {source: FinalGaps(groups, base, final_of(source)).percent for source in sources}
    lines = [f"| recipe above {base} | {' | '.join(sources)} |", "|" + "---|" * (len(sources) + 1)]
    for name in groups:
        if name != base:
            cells = [percent_cell(by_source[source].get(name)) for source in sources]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_final(groups: Groups, target: str | Path, against: str | None = None) -> Path:
    """Gaps to the first group, smallest on top: the mean with its 95% interval, and each pair as a tick; returns
    `target`. Filled: beyond the noise. The band is the standard deviation of the base's own runs; a dotted line stands
    at the gap of `against`. Raises ValueError if there is no pair of finished runs, or no group is called `against`."""
    base = next(iter(groups))
    of_base, _ = _compared(groups, against)
    rows = [
        Row(f"{name} ({gap.count})", gap, [pair.percent for pair in of_base.gaps[name]])
        for name, gap in of_base.percent.items()
    ]
    if not rows:
        raise ValueError(_NO_PAIR.format(base=base))
    noise, other = of_base.noise(base), of_base.percent.get(against or "")
    return draw_rows(
        rows,
        target,
        Words(f"held-out loss above {base} at the end (%)", "mean of the pairs", sources_note(groups)),
        noise=None if noise is None else (f"{base}: one standard deviation of its runs", noise.deviation),
        mark=None if other is None else (f"{against}", other.mean),
    )


def _compared(groups: Groups, against: str | None) -> tuple[FinalGaps, FinalGaps | None]:
    if against is not None and against not in groups:
        raise ValueError(f"--against {against}: no group has this name; the groups are {', '.join(groups)}")
    base = next(iter(groups))
    return FinalGaps(groups, base), FinalGaps(groups, against) if against not in (None, base) else None


def _end(found: FinalGaps, group: str) -> str:
    by_tokens, noise = found.ends(group), found.noise(group)
    count = sum(map(len, by_tokens.values()))
    deviation = "" if noise is None else f"{noise.deviation:.2f}%"
    if len(by_tokens) == 1:
        [losses] = by_tokens.values()
        return f"{sum(losses) / count:.4f}{' ± ' if deviation else ''}{deviation} ({count})"
    return f"± {deviation} ({count})" if deviation else f"({count})"


def _notes(of_base: FinalGaps, of_other: FinalGaps | None) -> list[str]:
    ends = list(of_base.ends(of_base.base))
    spans = " to ".join(short_tokens(tokens) for tokens in dict.fromkeys((ends[0], ends[-1])))
    lines = [
        f"loss at the end: of {of_base.base} after {spans} tokens; mean and standard deviation of finished runs, and "
        "how many they are.",
        "±, of gaps: one standard error of the mean over pairs. beyond the noise: zero is outside the 95% interval "
        "(Student's t); of twenty recipes that cost nothing, one or two are expected there.",
    ]
    for found, words in ((of_base, ""), *(((of_other, f", of those above {of_other.base}"),) if of_other else ())):
        if found.shared and any(row.shared for row in found.percent.values()):
            lines.append(
                f"*: of fewer than five pairs, by the standard deviation of gaps within all groups, pooled: "
                f"{found.shared.deviation:.2f}%, {counted(found.shared.freedom, 'degree')} of freedom{words}."
            )
    if note := sources_note(of_base.groups):
        lines.append(note)
    left = of_base.left_out()
    return [*lines, *(f"left out: {line}" for line in left)]
