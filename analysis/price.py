"""The cost of training in 4 bits: how many more tokens reach BF16's loss, and whether the faster step pays for them.

With BF16's loss after D tokens per parameter

    L(D) = floor + scale * D^-exponent                                  (Hoffmann et al. 2022, of one model size)

a recipe that ends `gap` nats above BF16 has the same loss as BF16 after fewer tokens D', with L(D') = L(D) + gap:

    price = D / D' = (1 + gap / (scale * D^-exponent))^(1 / exponent)

This prices the recipe's own final loss; to reach BF16's costs more if the price grows with D.

The cost of a recipe is its price times its time per token, both relative to BF16. The gaps of sixty steps from a BF16
checkpoint differ from those of complete runs; `GROWTH` turns them into a range. With a switch to BF16 for the last part
of a run, `LEFT_BY_SWITCH` of the gap remains. Both were measured on hybrid_30m only (docs/results.md,
docs/research.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from analysis.statistics import Estimate, gap_text
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.console import markdown, short_number
from megatron_fp4.planning.gpus import GPUS, seconds_of_a_token
from megatron_fp4.planning.needs import as_planned
from megatron_fp4.precision.support import emulated_linears
from megatron_fp4.training.build import plans_of
from models import provider as models

# The gap in nats at the end of a run, over the gap of sixty steps from BF16's run of the same seed after 4 or 5 tokens
# per parameter: the smallest ratio (at 10 tokens per parameter) and the largest (at 25).
GROWTH = (0.8, 1.8)
# Share of the steps that are in BF16, at the end -> share of the gap that remains.
LEFT_BY_SWITCH = {0.0: 1.0, 0.08: 0.39, 0.2: 0.24, 0.3: 0.15}


class Range(NamedTuple):
    """The bounds of a number."""

    low: float
    high: float

    def __str__(self) -> str:
        ends = dict.fromkeys(f"{end:.2f}" for end in self)
        return " to ".join(ends)


@dataclass(frozen=True)
class Curve:
    """The loss in nats after `tokens` tokens per parameter: floor + scale * tokens^-exponent. name: of the runs that it
    is fitted to. parameters: of their model, without embedding and head. lengths: the fewest and the most tokens per
    parameter of these runs."""

    name: str
    parameters: float
    floor: float
    scale: float
    exponent: float
    lengths: tuple[float, float] = field(default=(25, 800), kw_only=True)

    def loss(self, tokens: float) -> float:
        return self.floor + self.scale * tokens**-self.exponent

    def __str__(self) -> str:
        return f"{self.name} ({self.floor:.3f} + {self.scale:.3f} * D^-{self.exponent:.3f})"

    def price(self, gap: float, tokens: float) -> float:
        """The tokens for BF16's loss, over BF16's own. gap: nats above BF16 after `tokens` tokens per parameter. 0 if
        the gap is so negative that the loss is below the floor."""
        return float(max(0.0, 1 + gap / (self.scale * tokens**-self.exponent)) ** (1 / self.exponent))

    def price_text(self, gap: Estimate, tokens: float, time: float = 1.0) -> str:
        """The price of a gap in nats, `1.31 [1.22, 1.40]`, times `time`."""
        price = f"{time * self.price(gap.mean, tokens):.2f}"
        if gap.ends is None:
            return f"{price} (no interval)"
        low, high = (time * self.price(end, tokens) for end in gap.ends)
        return f"{price} [{low:.2f}, {high:.2f}]"

    def far_from(self, tokens: float) -> str:
        """That a price after `tokens` tokens per parameter is far from the runs of the curve; empty if it is not."""
        shortest, longest = self.lengths
        if 0.8 * shortest <= tokens <= 1.25 * longest:
            return ""
        ends = f"{short_number(shortest)} to {short_number(longest)}"
        return f"D = {short_number(tokens)} is far from the range {ends} of the curve's runs"


# `fit` of the BF16 runs of "Quartet II" (arXiv 2601.22813, `baseline` in for_plots/runs.json of its repository):
# Transformers on C4 with 25 to 800 tokens a parameter, one seed.
SHIPPED = tuple(
    Curve(f"Transformers on C4, {parameters / 1e6:.0f}M", parameters, *fitted)
    for parameters, *fitted in (
        (30482560, 2.95048, 1.85092, 0.42680),
        (49556736, 2.81506, 1.35708, 0.36247),
        (102777856, 2.68729, 1.36079, 0.43222),
    )
)


def fit(name: str, parameters: float, tokens: Sequence[float], losses: Sequence[float]) -> Curve:
    """Fit a curve by least squares. tokens, losses: tokens per parameter and final losses of BF16 runs whose learning
    rate has decayed.

    Raises ValueError for fewer than four different `tokens`, or losses that follow no such curve with a positive floor.
    """
    if len(set(tokens)) < 4:
        raise ValueError(
            f"{name}: a curve with three parameters needs runs of at least four lengths, and these have "
            f"{len(set(tokens))}; name more runs, or leave --curve out"
        )
    lengths, ends = np.array(tokens, dtype=float), np.array(losses, dtype=float)

    def solved(exponent: float) -> tuple[np.ndarray, float]:
        columns = np.stack([np.ones_like(lengths), lengths**-exponent], axis=1)
        best, *_ = np.linalg.lstsq(columns, ends, rcond=None)
        return best, float(((columns @ best - ends) ** 2).sum())

    exponent = float(minimize_scalar(lambda b: solved(b)[1], bounds=(0.02, 2.0), method="bounded").x)
    floor, scale = solved(exponent)[0]
    if floor < 0 or scale <= 0 or not 0.03 < exponent < 1.9:
        raise ValueError(f"{name}: the losses do not fall as a power of tokens; name runs that differ only in length")
    return Curve(name, parameters, float(floor), float(scale), exponent, lengths=(min(tokens), max(tokens)))


def nearest(parameters: float) -> Curve:
    """The shipped curve of the model that is nearest in size."""
    return min(SHIPPED, key=lambda curve: abs(np.log(curve.parameters / parameters)))


def planned_times(gpu: str, configs: Mapping[str, Config]) -> dict[str, float]:
    """By name, the planned time per token on `gpu`, over that of the first of `configs`. A recipe without a native
    backend is planned as emulated. Raises ValueError for a GPU without FP4 tensor cores, and for a run that switches
    its precision, whose tokens do not all take the same time."""
    if not (gpu in GPUS and GPUS[gpu].fp4):
        known = ", ".join(name for name, of in GPUS.items() if of.fp4)
        raise ValueError(f"--gpu {gpu}: name a GPU with FP4 tensor cores: {known}")
    seconds = {}
    for name, config in configs.items():
        plans, backend = plans_of(config, models), config.precision.backend
        if plans[1] is not None:
            raise ValueError(f"{name} switches its precision during the run, so no one time is planned; omit --gpu")
        there = replace(
            config,
            parallel=replace(config.parallel, gpu=gpu),  # type: ignore[arg-type]
            precision=replace(config.precision, backend="auto" if backend == "emulated" else backend),
        )
        emulated = emulated_linears(plans[0], as_planned(there, plans).precision.backend)
        flops = models.training_flops_per_token(config.model, config.train.sequence_length)
        seconds[name] = seconds_of_a_token(GPUS[gpu], plans[0], flops, config.run.dry_mfu, emulated)
    first = next(iter(seconds.values()))
    return {name: of / first for name, of in seconds.items()}


@dataclass(frozen=True)
class RecipeCost:
    """The measurements of one recipe. percent, nats: its loss above BF16's in the same steps. time: per token, over
    BF16's; None if unknown."""

    name: str
    percent: Estimate | None
    nats: Estimate | None
    time: float | None

    def price(self, curve: Curve, tokens: float, left: float = 1.0) -> Range | None:
        """The price in tokens; None if the gap has no interval. left: the share that remains after a switch."""
        if self.nats is None or self.nats.ends is None:
            return None
        gaps = (left * growth * max(0.0, end) for growth, end in zip(GROWTH, self.nats.ends, strict=True))
        return Range(*(curve.price(gap, tokens) for gap in gaps))

    def cost(self, price: Range | None, in_bf16: float = 0.0) -> Range | None:
        """Tokens times time per token, over BF16's. in_bf16: the share of steps after a switch to BF16."""
        if price is None or self.time is None:
            return None
        time = (1 - in_bf16) * self.time + in_bf16
        return Range(time * price.low, time * price.high)


def price_table(
    recipes: Sequence[RecipeCost], curve: Curve, tokens: float, times: str, doubts: Sequence[str] = ()
) -> str:
    """A Markdown table, BF16 first, and the verdict. tokens: per parameter, at the end of the run. times: the origin of
    the times per token, as text. doubts: see `verdict`."""
    heads = ["recipe", "above bf16", "nats per token", "tokens for BF16's loss", "time of a token", "cost"]
    rows = [["bf16", "-", "-", "1", "1", "1"]]
    for recipe in recipes:
        price = recipe.price(curve, tokens)
        time = None if recipe.time is None else f"{recipe.time:.2f}"
        gaps = gap_text(recipe.percent), gap_text(recipe.nats, "", 4)
        rows.append([recipe.name, *gaps, *(str(of or "-") for of in (price, time, recipe.cost(price)))])
    left = ", ".join(f"{left:.2f} (for the last {share:.0%})" for share, left in LEFT_BY_SWITCH.items() if share)
    notes = [
        "above bf16: training loss above BF16's in the same steps on the same tokens. [95% interval]; *: with the "
        "pooled variance of all recipes, as if it were equal for all.",
        f"tokens for BF16's loss: over BF16's own, at D = {tokens:.3g} tokens per parameter, by the curve of {curve}, "
        f"for gaps of {GROWTH[0]} times the lower end of the interval (at least 0) to {GROWTH[1]} times its upper end, "
        "as hybrid_30m's were after 10 and after 25 tokens per parameter; the error of the curve is not included.",
        f"time of a token: over BF16's, {times}; it has no interval. cost: tokens times time; below 1 a recipe pays.",
        f"share of the gap that remains after a switch to BF16: {left}; measured for nvfp4 on hybrid_30m, one seed.",
        "",
        verdict(recipes, curve, tokens, doubts),
    ]
    return markdown(heads, rows, notes)


def verdict(recipes: Sequence[RecipeCost], curve: Curve, tokens: float, doubts: Sequence[str] = ()) -> str:
    """Which recipe costs least, whether that is certain, and which switch to BF16 costs least. doubts: reasons why the
    prices may be wrong; with one of them nothing is certain."""
    prices = {recipe.name: recipe.price(curve, tokens) for recipe in recipes}
    costs = {recipe.name: cost for recipe in recipes if (cost := recipe.cost(prices[recipe.name])) is not None}
    if not costs:
        if all(price is None for price in prices.values()):
            return "Not established: no recipe's gap has an interval; train more steps."
        return "Not established: no recipe whose gap has an interval has a time of a token; give --gpu."
    lines = [
        f"{recipe.name} needs {prices[recipe.name]} times the tokens and takes {recipe.time:.2f} of the time of each: "
        f"{costs[recipe.name]} of BF16's cost."
        for recipe in recipes
        if recipe.name in costs
    ]
    unknown = [recipe.name for recipe in recipes if recipe.name not in costs]
    costs["bf16"] = Range(1.0, 1.0)
    best = min(costs, key=lambda name: sum(costs[name]))
    rivals = [name for name, cost in costs.items() if name != best and cost.low <= costs[best].high]
    doubts = [*doubts, *filter(None, [curve.far_from(tokens)])]
    if rivals:
        lines.append(f"Not established which costs least: {best} and {', '.join(rivals)} overlap.")
    elif doubts:
        lines.append(f"Not established that {best} costs least, as these numbers say:")
        lines += [f"- {doubt}" for doubt in doubts]
    else:
        lines.append(f"{best} costs least here, if these times hold and the gaps grow as hybrid_30m's did.")
    if unknown:
        lines.append(f"Not compared, without an interval or a time: {', '.join(unknown)}.")
    lines.append(_switch_verdict(recipes, curve, tokens, costs, best))
    return "\n".join(lines)


def _switch_verdict(
    recipes: Sequence[RecipeCost], curve: Curve, tokens: float, costs: Mapping[str, Range], best: str
) -> str:
    """Whether a switch to BF16 costs less. costs: without a switch, by recipe, BF16's too. best: the cheapest."""
    switched = {
        (recipe.name, share): cost
        for recipe in recipes
        for share, left in LEFT_BY_SWITCH.items()
        if (cost := recipe.cost(recipe.price(curve, tokens, left=left), share)) is not None
    }
    (name, share), cost = min(switched.items(), key=lambda item: sum(item[1]))
    if not share or sum(cost) >= sum(costs[best]):
        return f"With a switch to BF16 no recipe costs less than {best}."
    # Both costs of the same recipe come from one gap, so compare lower with lower and upper with upper ends.
    own = costs[name]
    less_than_own = cost.low < own.low and cost.high < own.high
    less_than_others = all(cost.high < other.low for rival, other in costs.items() if rival != name)
    switch = f"{name} with the last {share:.0%} in BF16"
    if less_than_own and less_than_others:
        return f"With a switch to BF16: {switch} costs less, {cost}, if it leaves as much of the gap as nvfp4's did."
    return f"Not established whether a switch to BF16 costs less: {switch}, {cost}."
