"""Masked documents: the results of a document in a row are those of the document alone."""

import functools
import itertools

import pytest
import torch
from torch import Tensor

from models.attention import attend
from models.mamba2 import causal_conv_silu
from models.positions import Documents
from models.ssd import ssd_scan
from tests.models.builders import build, small_config

# A chunk of the scan has 8 tokens. Documents end at its end and in its middle, several in a chunk, and after one token.
LENGTHS = [[5, 1, 1, 9, 5], [21], [1] * 21, [8, 8, 5], [20, 1], [1, 20], [3, 12, 6]]


def numbers_of(lengths: list[list[int]]) -> Tensor:
    """The document numbers of rows with documents of these lengths, int32 [rows, sum of lengths]."""
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return torch.stack(rows).to(torch.int32)


def spans(lengths: list[list[int]]) -> list[tuple[int, slice]]:
    """The row and the slice of tokens of every document."""
    documents = []
    for row, row_lengths in enumerate(lengths):
        ends = itertools.accumulate(row_lengths)
        documents += [(row, slice(end - length, end)) for end, length in zip(ends, row_lengths, strict=True)]
    return documents


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_where_documents_begin():
    lengths = [[3, 1, 2], [6], [1, 4, 1]]
    documents = Documents(numbers_of(lengths))
    assert documents.positions.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 0]]
    assert documents.boundaries.tolist() == [0, 3, 4, 6, 12, 13, 17, 18]
    assert documents.boundaries.dtype == documents.numbers.dtype == torch.int32
    assert torch.equal(Documents(numbers_of(lengths), 7).boundaries, documents.boundaries)
    # Numbers may begin at any value and skip values.
    assert torch.equal(Documents(numbers_of(lengths) * 3 + 2).boundaries, documents.boundaries)
    for row, q, k in itertools.product(range(3), range(6), range(6)):
        document = next(span for r, span in spans(lengths) if r == row and span.start <= q < span.stop)
        assert documents.mask[row, 0, q, k] == (document.start <= k <= q)


def assert_same_as_alone(function, tensors: list[Tensor], lengths: list[list[int]], *, num_parameters: int = 0):
    """Compare value and gradients of `function(*tensors, documents)` over all rows with those of each document alone.

    The last `num_parameters` tensors are parameters; their gradients are sums over documents.
    """
    tensors = [t.requires_grad_() for t in tensors]
    inputs, parameters = tensors[: len(tensors) - num_parameters], tensors[len(tensors) - num_parameters :]
    y = function(*tensors, numbers_of(lengths))
    weights = randn(*y.shape, seed=7).to(y.dtype)
    actual = torch.autograd.grad((y * weights).sum(), tensors)
    totals = [torch.zeros_like(p) for p in parameters]
    equal = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)
    for row, span in spans(lengths):
        alone = [t[row : row + 1, span].detach().requires_grad_() for t in inputs]
        expected = function(*alone, *parameters, None)
        equal(y[row : row + 1, span], expected)
        gradients = torch.autograd.grad((expected * weights[row : row + 1, span]).sum(), [*alone, *parameters])
        for a, e in zip(actual, gradients[: len(inputs)], strict=False):
            equal(a[row : row + 1, span], e)
        for total, gradient in zip(totals, gradients[len(inputs) :], strict=True):
            total += gradient
    for a, e in zip(actual[len(inputs) :], totals, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [1, 4])
def test_convolution(width):
    tensors = [randn(len(LENGTHS), 21, 6), randn(6, width), randn(6)]
    assert_same_as_alone(causal_conv_silu, tensors, LENGTHS, num_parameters=2)


@pytest.mark.parametrize("chunk_size", [4, 64])
def test_scan(chunk_size):
    rows, groups, state = (len(LENGTHS), 21), 2, 3
    x, dt = randn(*rows, 4, 5, seed=2), randn(*rows, 4, seed=3).abs() * 0.5 + 1e-3
    b, c = (randn(*rows, groups, state, seed=seed) for seed in (4, 5))

    def scan(x, dt, b, c, a, documents):
        return ssd_scan(x, dt, a, b, c, chunk_size, documents)

    assert_same_as_alone(scan, [x, dt, b, c, -randn(4, seed=6).abs() * 5 - 0.1], LENGTHS, num_parameters=1)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention(kv_heads):
    tensors = [randn(len(LENGTHS), 21, heads, 8, seed=heads) for heads in (4, kv_heads, kv_heads)]
    assert_same_as_alone(lambda q, k, v, n: attend(q, k, v, None if n is None else Documents(n)), tensors, LENGTHS)


def test_logits_of_a_document_are_those_of_the_document_alone(mesh):
    model = build(small_config(rope=True, init_std=0.2), mesh, seed=3)
    text = torch.randint(0, 96, (len(LENGTHS), 22), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(text[:, :-1], documents=numbers_of(LENGTHS))
        joined = model(text[:, :-1])
        for row, span in spans(LENGTHS):
            alone = model(text[row : row + 1, span])
            torch.testing.assert_close(logits[row : row + 1, span], alone, rtol=2e-4, atol=2e-4)
    assert (logits - joined).abs().max() > 0.05
    # A row that is one document has the logits of a model without masks.
    torch.testing.assert_close(logits[1], joined[1], rtol=2e-4, atol=2e-4)
