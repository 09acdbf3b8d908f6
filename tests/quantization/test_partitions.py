"""Any partition of a tensor's rows has the codes of the whole."""

import pytest
import torch

from megatron_fp4.quantization.rounding import Place, RoundingKey, Span, random_bits, random_uniform, rounding_draws
from tests.quantization.partitions import CASES, check_parts


@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_codes_of_the_whole(name: str) -> None:
    check_parts(CASES[name], "cpu")


@pytest.mark.parametrize("function", [random_bits, random_uniform, rounding_draws])
def test_the_draws_of_an_index_are_those_of_its_positions(function) -> None:
    """In any order: tokens of an expert, of several micro-batches, do not come in pairs."""
    whole = function(RoundingKey(99), 64, 96, "cpu")
    rows, columns = torch.randperm(64)[:20], torch.randperm(96)[:31]
    place = Place(Span(rows), Span(columns))
    assert torch.equal(function(RoundingKey(99, place), 20, 31, "cpu"), whole[rows][:, columns])
    transposed = function(RoundingKey(99), 96, 64, "cpu")
    assert torch.equal(function(RoundingKey(99, place.t()), 31, 20, "cpu"), transposed[columns][:, rows])
