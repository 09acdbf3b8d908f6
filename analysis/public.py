"""Prices of recipes from a table of losses, such as others publish.

The table is a CSV file; lines that begin with # say where it is from:

    step,decayed,bf16,nvfp4
    2500,no,2.77961,2.84462
    30000,yes,2.27834,2.32592

The first column says after how long, in any unit: a price is a ratio of tokens. `decayed` is left out if all rows are
alike. The other columns are losses in nats, the base first; a cell of a recipe may be empty. A row with `yes` is after
the learning rate of the same run began to decay.

    price    of a row that has not decayed: D / D', where the base's curve has after D' the loss that the recipe's curve
             has after D. Its 95% interval is a jackknife over the rows and tells nothing about other seeds.
    at least a decayed row's D / D', where the base's own run passes the recipe's loss after D'. A run that had decayed
             by D' would be lower there, so the price is at least this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.price import Range, fit
from analysis.statistics import Estimate
from megatron_fp4.logging.console import markdown

_DECAYED = "decayed"


class Priced(NamedTuple):
    """A recipe at its last row that has not decayed. floor: the least price at the last decayed row, or None."""

    name: str
    length: float
    price: Estimate
    floor: float | None


def read_table(path: Path) -> pd.DataFrame:
    """The losses by length, and whether each row has decayed. Raises OSError, and ValueError for a malformed table."""
    try:
        table = pd.read_csv(path, comment="#", index_col=0, skipinitialspace=True)
        decayed = table.pop(_DECAYED) if _DECAYED in table else pd.Series("no", table.index)
        losses, lengths = table.astype(float), table.index.to_numpy(dtype=float)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no CSV of losses, as the top of analysis/public.py describes: {error}") from error
    if losses.shape[1] < 2:
        raise ValueError(f"{path} has {losses.shape[1]} columns of losses: give a base, then one recipe or more")
    if not (lengths > 0).all() or not (np.diff(lengths) > 0).all():
        raise ValueError(f"{path}: {table.index.name} has to be above 0 and to rise from row to row")
    if "".join(decayed.map({"no": "n", "yes": "y"}).fillna("?")).lstrip("n").strip("y"):
        raise ValueError(f"{path}: {_DECAYED} is no in the first rows and yes in the last ones, if there are any")
    if losses.iloc[:, 0].isna().any() or not (losses.isna() | ((losses > 0) & np.isfinite(losses))).all(axis=None):
        raise ValueError(f"{path}: losses are positive and finite, and {losses.columns[0]} has one in every row")
    return losses.assign(**{_DECAYED: decayed == "yes"})


def public_table(path: Path, times: Mapping[str, float], planned_for: str) -> str:
    """A Markdown table of the rows of `path`, the prices and a verdict. times: by recipe, the time per token over the
    base's; planned_for: what they are planned for. Raises ValueError and OSError, as `read_table`."""
    table = read_table(path)
    base, *recipes = [str(name) for name in table if name != _DECAYED]
    rows, priced = [], []
    for name in recipes:
        own = table[[base, name, _DECAYED]].dropna()
        of_recipe, prices, floor = own[~own[_DECAYED]], {}, None
        if len(of_recipe) > 4:
            prices = _prices(name, of_recipe.index.to_numpy(dtype=float), *(of_recipe[of] for of in (base, name)))
        for length, row in own.iterrows():
            gap, price = row[name] - row[base], prices.get(length)
            least = _least(table, base, float(length), row[name]) if row[_DECAYED] else None
            floor = least or floor
            text = "-" if price is None else _text(price)
            cells = [f"{gap:.4f}", f"{100 * gap / row[base]:.2f}%", text, "-" if least is None else f"{least:.2f}"]
            rows.append([name, f"{length:g}", *cells])
        if prices:
            priced.append(Priced(name, *list(prices.items())[-1], floor))
    heads = ["recipe", str(table.index.name), f"above {base}", "percent", "price, not decayed", "at least, decayed"]
    if not priced:
        return markdown(heads, rows, ["No price: it needs five rows that have not decayed."])
    notes = [
        f"price: tokens for the recipe's loss, over {base}'s, by curves through the rows that have not decayed. "
        "[95% interval] by leaving out rows: of one run each, without the scatter between seeds.",
        f"at least: {base}'s own run has the recipe's loss after so many times fewer tokens, before its own end.",
        "",
        *_verdict(priced, times, planned_for, base, str(table.index.name)),
    ]
    return markdown(heads, rows, notes)


def _prices(name: str, lengths: np.ndarray, base: pd.Series, recipe: pd.Series) -> dict[float, Estimate]:
    """By length, the price, with the standard error of a jackknife over rows."""

    def prices(kept: np.ndarray) -> np.ndarray:
        of_base, of_recipe = (fit(name, 1, list(lengths[kept]), list(of[kept])) for of in (base, recipe))
        return np.array([of_base.price(of_recipe.loss(d) - of_base.loss(d), d) for d in lengths])

    count = len(lengths)
    found = prices(np.full(count, True))
    without = np.stack([prices(np.arange(count) != left_out) for left_out in range(count)])
    errors = np.sqrt((count - 1) / count * ((without - without.mean(axis=0)) ** 2).sum(axis=0))
    return {
        float(length): Estimate(float(price), float(error), count, count - 3)
        for length, price, error in zip(lengths, found, errors, strict=True)
    }


def _least(table: pd.DataFrame, base: str, length: float, loss: float) -> float:
    """`length` over the last length at which the base's run is above `loss`, between rows on a straight line."""
    lengths, losses = table.index.to_numpy(dtype=float), table[base].to_numpy()
    above = np.flatnonzero((losses > loss) & (lengths <= length))
    if not len(above) or above[-1] + 1 == len(losses):
        return 1.0
    at = above[-1]
    share = (losses[at] - loss) / (losses[at] - losses[at + 1])
    return float(length / (lengths[at] + share * (lengths[at + 1] - lengths[at])))


def _verdict(
    priced: Sequence[Priced], times: Mapping[str, float], planned_for: str, base: str, unit: str
) -> Iterator[str]:
    """Lines: each recipe's tokens and cost, and which costs least. unit: of the lengths."""
    least, costs = {}, {base: Range(1.0, 1.0)}
    for name, length, price, floor in priced:
        low, high = price.ends or (0.0, math.inf)
        least[name] = low if floor is None else min(low, floor)
        bound = "" if floor is None else f", at least {floor:.2f} times in the last row"
        yield f"{name} needs {_text(price)} times {base}'s tokens at {unit} {length:g}{bound}."
        if name in times:
            costs[name] = Range(least[name] * times[name], high * times[name])
            yield f"{name} takes {times[name]:.2f} of {base}'s time{planned_for}: {costs[name]} of its cost."
    if len(costs) == 1:
        yield "No verdict: give --gpu, --model and recipes with the names of the columns, which have a planned time."
        return
    best = min(costs, key=lambda name: costs[name].high)
    rivals = [name for name, cost in costs.items() if name != best and cost.low <= costs[best].high]
    yield (
        f"Not established which costs least: {best}, {', '.join(rivals)}."
        if rivals
        else f"{best} costs least of these."
    )
    for other in (of for of in times if of != base and of not in least):
        for name in (of for of in costs if of != base):
            limit = times[other] / times[name]
            text = f"{name} costs less than {other} ({times[other]:.2f} of the time) below {limit:.2f} times its tokens"
            needed = least[name] / limit
            yield (
                f"{text}, so only if {other} needs more than {needed:.2f} times {base}'s." if needed > 1 else f"{text}."
            )


def _text(price: Estimate) -> str:
    assert price.ends is not None
    return f"{price.mean:.2f} [{price.ends[0]:.2f}, {price.ends[1]:.2f}]"
