"""Attention in tiles on a GPU: close to FP64, the same bits in every run and in a CUDA graph, documents masked."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models import attention
from models.attention import TILES, attend, attend_in_tiles
from models.positions import Documents
from tests.gpu import INTERPRETED
from tests.gpu.test_model_kernels import LENGTHS, ODD, numbers_of, randn
from tests.models.builders import relative_error
from tests.models.test_documents import spans

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def heads(batch: int, length: int, dim: int) -> list[Tensor]:
    return [randn(batch, length, count, dim) for count in (4, 2, 2)]


def attended(tensors: list[Tensor], dy: Tensor, documents: Documents | None = None) -> tuple[Tensor, ...]:
    """The result of attention and its gradients."""
    y = attend_in_tiles(*tensors, documents)  # type: ignore[call-arg]
    return (y.detach(), *torch.autograd.grad(y, tensors, dy))


def compare(tensors: list[Tensor], documents: Documents | None = None) -> None:
    """Results are as close to FP64 as the rounding of score gradients to BF16 allows; all runs have the same bits."""
    copies = [t.detach().double().requires_grad_() for t in tensors]
    expected = attend(*copies, documents)  # type: ignore[call-arg]
    dy = torch.randn_like(tensors[0])
    reference = torch.autograd.grad(expected, copies, dy.double())
    runs = [attended(tensors, dy, documents) for _ in range(1 if INTERPRETED else 3)]
    for index, (ours, theirs) in enumerate(zip(runs[0], (expected, *reference), strict=True)):
        assert ours.dtype == torch.bfloat16 and relative_error(ours, theirs.detach()) < 1e-2, index
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize(("length", "by_cudnn"), [(384, True), (333, True), (333, False), (2, False)])
@pytest.mark.parametrize("dim", TILES)
def test_whole_rows(monkeypatch: pytest.MonkeyPatch, dim: int, length: int, by_cudnn: bool) -> None:
    if not by_cudnn:
        monkeypatch.setattr(attention, "_cudnn_supports", lambda *_: False)
    compare(heads(1 if INTERPRETED else 2, length, dim))


@pytest.mark.parametrize("dim", TILES)
def test_documents(dim: int) -> None:
    for lengths in (ODD,) if INTERPRETED and dim != 64 else (LENGTHS, ODD):
        documents = Documents(numbers_of(lengths))
        compare(heads(*documents.numbers.shape, dim), documents)  # type: ignore[call-arg]


@pytest.mark.parametrize("lengths", [LENGTHS, ODD])
def test_a_document_is_what_it_is_alone(lengths: list[list[int]]) -> None:
    """The rest of its row changes no bit of it."""
    documents = Documents(numbers_of(lengths))
    tensors = heads(*documents.numbers.shape, 64)  # type: ignore[call-arg]
    dy = torch.randn_like(tensors[0])
    expected = attended(tensors, dy, documents)
    for row, span in spans(lengths)[:: 69 if INTERPRETED else 7]:
        others = [torch.randn_like(t) * 3 for t in (*tensors, dy)]
        for t, own in zip(others, (*tensors, dy), strict=True):
            t[row, span] = own.detach()[row, span]
        results = attended([t.requires_grad_() for t in others[:3]], others[3], documents)
        assert all(torch.equal(a[row, span], b[row, span]) for a, b in zip(results, expected, strict=True))
        alone = [t.detach()[row : row + 1, span].clone().requires_grad_() for t in tensors]
        results = attended(alone, dy[row : row + 1, span])
        assert all(relative_error(b[row, span], a[0]) < 1e-2 for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_in_a_cuda_graph(masked: bool) -> None:
    numbers, tensors = numbers_of(LENGTHS), heads(4, 384, 64)
    dy = torch.randn_like(tensors[0])

    def step() -> tuple[Tensor, ...]:
        return attended(tensors, dy, Documents(numbers) if masked else None)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        if masked:  # other documents in the same memory
            numbers.copy_(numbers.flip(0).clone())
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
