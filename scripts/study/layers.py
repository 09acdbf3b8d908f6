"""Section `layers`: the error of every linear of the captured model."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp4.precision.recipe import GEMMS
from scripts.study.pictures import draw_layers
from scripts.study.tables import table
from scripts.study.tensors import Study


def study_layers(study: Study) -> Iterator[tuple[str, str]]:
    """Relative error of the three products of every linear."""
    errors = study.errors
    rows = [[f"`{name}`", *(f"{one[g]:.3f}" for g in GEMMS)] for name, one in errors.items()]
    yield "layers", table(["linear", *GEMMS], rows)
    if study.pictures is not None:
        draw_layers(errors, study.pictures / "layers.png")
