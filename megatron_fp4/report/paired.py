"""What a recipe costs, over several seeds: each run against the base run of the same seed, with standard errors.

Runs of one seed start from the same weights and read the same tokens in the same order; what differs between them is
the recipe and how the recipe's noise grows. Seeds say how far that noise goes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_fp4.report.metrics import records_of_run
from megatron_fp4.report.picture import BLACK, INK, legend_below, look, open_frame, picture


@dataclass(frozen=True)
class HeldOut:
    """Validation losses of one run (nats per token, mean of the sources, each weighed alike) by tokens trained on."""

    seed: int
    losses: dict[int, float]


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation (None of a single number) and how many numbers there were."""

    mean: float
    deviation: float | None
    count: int

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.count)


def spread(numbers: Sequence[float]) -> Spread:
    """Of at least one number."""
    return Spread(statistics.mean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers))


def read_held_out(run_dir: str | Path) -> HeldOut:
    """Of the run in `run_dir`, finished or not.

    Raises FileNotFoundError if there is no metrics.jsonl or no config.yaml, and ValueError if nothing was validated
    or the seed is not in config.yaml.
    """
    config_file = Path(run_dir) / "config.yaml"
    if not config_file.exists():
        raise FileNotFoundError(f"{config_file} does not exist; the seed of a run stands there")
    try:
        seed = int(yaml.safe_load(config_file.read_text())["run"]["seed"])
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{config_file} names no run.seed") from error
    losses = {}
    for record in records_of_run(run_dir):
        if record["kind"] == "validation":
            measured = [loss for loss in record["losses"].values() if loss is not None]
            if measured and len(measured) == len(record["losses"]):
                losses[int(record["tokens"])] = statistics.mean(measured)
    if not losses:
        raise ValueError(f"{run_dir} has no validation losses to compare")
    return HeldOut(seed, losses)


def gaps(runs: Sequence[HeldOut], base: Sequence[HeldOut]) -> dict[int, dict[int, float]]:
    """Tokens -> seed -> loss above the base run of that seed, in percent of it, where both were measured.

    Raises ValueError if a seed comes twice, or nothing can be paired.
    """
    for group in (runs, base):
        seeds = [run.seed for run in group]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds {sorted(seeds)}: name one run of each seed")
    base_of = {run.seed: run.losses for run in base}
    found: dict[int, dict[int, float]] = {}
    for run in runs:
        for tokens, loss in run.losses.items():
            if tokens in base_of.get(run.seed, {}):
                found.setdefault(tokens, {})[run.seed] = 100 * (loss / base_of[run.seed][tokens] - 1)
    if not found:
        seeds = sorted(run.seed for run in runs)
        raise ValueError(
            f"no pair: the runs have the seeds {seeds}, the base {sorted(base_of)}; both must have been validated "
            "after equally many tokens"
        )
    return dict(sorted(found.items()))


def table(groups: Mapping[str, Sequence[HeldOut]]) -> str:
    """Markdown; the first group is the base. A row for each number of tokens that the base was measured after."""
    base_name, *others = groups
    base = groups[base_name]
    gap_of = {name: gaps(groups[name], base) for name in others}
    lines = [
        f"| tokens | {base_name} | standard deviation | " + " | ".join(f"{name} above it" for name in others) + " |",
        "|---|---|---|" + "---|" * len(others),
    ]
    for tokens in sorted({tokens for run in base for tokens in run.losses}):
        of_base = spread([run.losses[tokens] for run in base if tokens in run.losses])
        cells = [
            f"{tokens / 1e6:,.0f}M",
            f"{of_base.mean:.4f} ({of_base.count})",
            "-" if of_base.deviation is None else f"{100 * of_base.deviation / of_base.mean:.2f}%",
        ]
        for name in others:
            at = gap_of[name].get(tokens)
            cells.append("-" if at is None else _cell(spread(list(at.values()))))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(gap: Spread) -> str:
    error = "" if gap.error is None else f" ± {gap.error:.2f}"
    return f"{gap.mean:+.2f}%{error} ({gap.count})"


def draw(groups: Mapping[str, Sequence[HeldOut]], target: str | Path) -> Path:
    """Gaps over tokens: the mean with its standard error, and each pair as a dot; returns `target`.

    The band is the base's own standard deviation over its seeds: what two runs differ by that differ in nothing else.
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
                label=f"{base_name}: one standard deviation over seeds",
            )  # fmt: skip
        axes.axhline(0, color=INK, linewidth=1.0)
        for index, name in enumerate(others, start=1):
            style = look(index)
            by_tokens = {tokens: list(at.values()) for tokens, at in gaps(groups[name], base).items()}
            means = {tokens: spread(at) for tokens, at in by_tokens.items()}
            count = max(s.count for s in means.values())
            axes.errorbar(
                [t / 1e6 for t in means], [s.mean for s in means.values()], [s.error or 0.0 for s in means.values()],
                capsize=4 if count > 1 else 0, **style.points(linewidth=1.5),
                label=f"{name}, {count} seed{'s' if count > 1 else ''}",
            )  # fmt: skip
            if count > 1:
                for tokens, at in by_tokens.items():
                    axes.plot(
                        [tokens / 1e6] * len(at), at, color=style.color, linestyle="none", marker=style.marker,
                        markersize=3, alpha=0.5,
                    )  # fmt: skip
        axes.set_xlabel("tokens (millions)")
        axes.set_ylabel(f"held-out loss above {base_name} of the same seed (%)")
        open_frame(axes)
        legend_below(figure, axes)
    return target
