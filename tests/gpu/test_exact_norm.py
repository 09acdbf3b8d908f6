"""Sums of a row's squares on the GPU: right, and the same whichever rows a rank has."""

import pytest
import torch

from megatron_fp4.parallel.reproducible import row_squares

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("columns", [1, 4, 15, 16, 513, 4096, 10_001])
def test_rows_have_the_same_sums_on_any_rank(columns: int) -> None:
    whole = torch.randn(77, columns, device=CUDA) * torch.randn(77, 1, device=CUDA).exp()
    found = row_squares([whole], CUDA)
    assert torch.allclose(found, whole.double().square().sum(1), rtol=1e-14, atol=0.0)
    for begin, end in ((0, 1), (1, 18), (18, 77)):
        assert torch.equal(row_squares([whole[begin:end]], CUDA), found[begin:end])
        shard = torch.empty(1 + (end - begin) * columns, device=CUDA)[1:].view(-1, columns)  # not aligned to 16 bytes
        assert torch.equal(row_squares([shard.copy_(whole[begin:end])], CUDA), found[begin:end])
