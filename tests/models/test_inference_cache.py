"""Texts that continue from a cache have the logits of a forward pass over the whole text."""

import pytest
import torch
from torch import Tensor

from megatron_fp4.parallel.mesh import ParallelMesh
from models.hybrid import HybridModel
from tests.models.builders import build, small_config

PATTERNS = {
    "hybrid": {"pattern": "M-*-M-"},
    "transformer": {"pattern": "*-*-", "rope": True, "num_kv_heads": 1},
    "all Mamba": {"pattern": "MMM", "mamba_num_groups": 1, "mamba_conv_width": 3},
}
LENGTH = 41  # not a multiple of the scan's chunks of 8


def text(batch: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(96, (batch, length), generator=torch.Generator().manual_seed(5))


@pytest.fixture(params=PATTERNS)
def model(request: pytest.FixtureRequest, mesh: ParallelMesh) -> HybridModel:
    return build(small_config(**PATTERNS[request.param], init_std=0.2), mesh)


def test_rows_of_different_lengths(model: HybridModel) -> None:
    """A row may have any number of tokens in a call, including none."""
    tokens = text()
    with torch.no_grad():
        whole = model(tokens)
    cache, done = model.new_cache(3, LENGTH), [0, 0, 0]
    for counts in ([5, 17, 1], [1, 1, 1], [0, 1, 2], [9, 0, 1], [1, 1, 1], [0, 0, 8], [1, 3, 0]):
        columns = torch.full((3, max(counts)), 95)  # any token may be padding
        for row, count in enumerate(counts):
            columns[row, :count] = tokens[row, done[row] : done[row] + count]
            done[row] += count
        logits = model(columns, cache=cache, counts=counts)
        for row, count in enumerate(counts):
            if count:
                torch.testing.assert_close(logits[row], whole[row, done[row] - 1], rtol=0, atol=1e-5)
    assert cache.lengths == done


def test_padding_does_not_overwrite_a_full_cache(mesh: ParallelMesh) -> None:
    model = build(small_config(pattern="*", init_std=0.2), mesh)
    tokens = text(2, 8)
    with torch.no_grad():
        whole = model(tokens)
    cache = model.new_cache(2, 8)
    model(tokens[:, :7], cache=cache, counts=[7, 1])
    logits = model(torch.stack([tokens[0, [7, 0, 0]], tokens[1, 1:4]]), cache=cache, counts=[1, 3])
    torch.testing.assert_close(logits[0], whole[0, 7], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[1], whole[1, 3], rtol=0, atol=1e-5)
