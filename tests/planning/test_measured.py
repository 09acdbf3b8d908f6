"""Planned steps against those measured, which docs/parallelism.md lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data import provider as data
from megatron_fp4.config.compose import compose_config
from megatron_fp4.planning.needs import as_planned, plan_run
from megatron_fp4.training.build import plans_of
from models import provider as models
from pretrain import CONFIGS

PAGE = Path(__file__).parents[2] / "docs/parallelism.md"
# | GPUs | `overrides` | measured (others) | planned |
ROWS = re.findall(r"^\| (\d) \| `(.+)` \| (\d+)[^|]* \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
COMMON = ["train.sequence_length=8192", "precision.switch.when=never", "parallel.gpu=h200"]


def test_planned_steps_are_within_a_tenth_of_measured_ones() -> None:
    assert len(ROWS) == 8
    for _, overrides, measured, planned in ROWS:
        assert 0.9 < int(planned) / int(measured) < 1.1, overrides


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row[0] == "2"])  # the others take as long again
def test_the_page_has_what_is_planned(row: tuple[str, str, str, str]) -> None:
    ranks, overrides, _, planned = row
    config = compose_config([*COMMON, *overrides.split()], CONFIGS)
    _, times = plan_run(as_planned(config, plans_of(config, models)), models, data, int(ranks))
    assert round(1000 * times[0][1].seconds) == int(planned)
