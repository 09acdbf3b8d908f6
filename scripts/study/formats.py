"""Section `formats`: the error of each number format on each kind of tensor."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.study.errors import FORMATS, NEAREST, UNCOMMON, statistics, stochastic
from scripts.study.pictures import draw_formats
from scripts.study.tables import short, table
from scripts.study.tensors import Study, synthetic


def study_formats(study: Study) -> Iterator[tuple[str, str]]:
    """Signal to noise and zeroed values of every format on every kind of tensor."""
    tensors = synthetic(study.size.side)
    for name, kept in study.captured.items():
        tensors |= {f"{short(name)} {which}": tensor for which, tensor in kept.items()}
    nearest = {name: {f: statistics(x, op) for f, op in FORMATS.items()} for name, x in tensors.items()}
    few = [f for f in FORMATS if f not in UNCOMMON]
    random = {name: {f: statistics(x, stochastic(FORMATS[f])) for f in few} for name, x in tensors.items()}
    crest = {name: statistics(x, NEAREST)["crest"] for name, x in tensors.items()}
    rows = [[n, f"{crest[n]:.0f}", *(f"{one['snr_db']:.1f}" for one in nearest[n].values())] for n in tensors]
    yield "snr-nearest", table(["tensor", "crest", *FORMATS], rows)
    rows = [[n, *(f"{random[n][f]['snr_db']:.1f}" for f in few)] for n in tensors]
    yield "snr-stochastic", table(["tensor", *few], rows)
    cell = "{:.1%} / {:.1%}".format
    rows = [[n, *(cell(nearest[n][f]["zeroed"], random[n][f]["zeroed"]) for f in few)] for n in tensors]
    yield "zeroed", table(["tensor", *few], rows)
    if study.pictures is not None:
        draw_formats(nearest, study.pictures / "formats.png")
