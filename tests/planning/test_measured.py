"""The tables of docs/parallelism.md: planned beside measured steps, and starts on 64 GPUs."""

import re

import pytest

from data import provider as data
from megatron_fp4.config.checks import validate
from megatron_fp4.config.schema import Config
from megatron_fp4.planning.gpus import GPUS
from megatron_fp4.planning.needs import as_planned, plan_run
from models import provider as models
from tests.composing import composed, plans_of
from tests.programs import ROOT

PAGE = ROOT / "docs" / "parallelism.md"
# | GPUs | `overrides` | measured (others) | planned |
ROWS = re.findall(r"^\| (\d) \| `(.+)` \| (\d+)[^|]* \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
# | `experiment=...` | peak on Hopper, on Blackwell GiB |
STARTS = re.findall(r"^\| `(experiment=.+)` \| (\d+), (\d+) GiB \|", PAGE.read_text(), re.MULTILINE)
COMMON = ["train.sequence_length=8192", "precision.switch.when=never", "parallel.gpu=h200"]


def test_planned_steps_are_within_a_tenth_of_measured_ones() -> None:
    assert len(ROWS) == 9
    for _, overrides, measured, planned in ROWS:
        assert 0.9 < int(planned) / int(measured) < 1.1, overrides


@pytest.mark.slow
def test_the_planned_time_of_the_page_is_current() -> None:
    """Only a row of two ranks is planned here; the others take long."""
    ranks, overrides, _, planned = next(row for row in ROWS if row[0] == "2")
    config = composed(*COMMON, *overrides.split())
    config = as_planned(config, plans_of(config))
    _, times = plan_run(config, models, data.phases(config), int(ranks))
    assert round(1000 * times[0][1].seconds) == int(planned)


def start_of(overrides: str, gpu: str) -> Config:
    """The planned configuration of a row of `STARTS`, with data."""
    found = ["data.sources={web: /d/web}", "data.blends={first: {web: 1}, second: {web: 1}, third: {web: 1}}"]
    config = composed(*overrides.split(), *found, f"parallel.gpu={gpu}")
    return as_planned(config, plans_of(config))


@pytest.mark.parametrize("gpu", GPUS)
def test_starts_on_64_gpus_are_valid_and_fit(gpu: str) -> None:
    assert len(STARTS) == 3
    for overrides, *peaks in STARTS:
        config = start_of(overrides, gpu)
        validate(config, 64, "cuda", models.divided_counts(config.model))
        assert int(peaks[config.precision.backend == "transformer_engine"]) < GPUS[gpu].memory - 3  # NCCL's buffers


@pytest.mark.slow(seconds=15)
def test_the_planned_peak_of_the_smallest_start_is_current() -> None:
    """The others are not planned here: each takes half a minute."""
    overrides, _, blackwell = STARTS[0]
    config = start_of(overrides, "b200")
    dry, _ = plan_run(config, models, data.phases(config), 64)
    assert round(dry.memory.peak / 2**30) == int(blackwell)
