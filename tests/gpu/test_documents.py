"""Masked documents on a GPU: the fused kernels against the PyTorch path, and each document against itself alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models.conv import causal_conv_silu, fused_conv_silu
from models.positions import Documents
from models.sdpa import attend, attend_fused
from models.ssd import ScanInputs, fused_scan, plain_scan
from tests.gpu.test_model_kernels import compare, fused, mesh, model_of, pytestmark, randn, relative_error, text

__all__ = ["mesh", "pytestmark"]  # the fixture and the marks are the same

# Chunks of the scan are 128 tokens, tiles of attention 64 or 128; 384 and 257 are whole and odd numbers of them.
LENGTHS = [[100, 28, 1, 1, 254], [384], [127, 1, 128, 128], [3] * 128]
ODD = [[1, 128, 128], [127, 130], [256, 1]]


def numbers_of(lengths: list[list[int]]) -> Tensor:
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return torch.stack(rows).to("cuda", torch.int32)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("lengths", [LENGTHS, ODD])
def test_convolution(lengths: list[list[int]]) -> None:
    numbers = numbers_of(lengths)
    x, weight, bias = randn(*numbers.shape, 64), randn(64, 4, dtype=torch.float32), randn(64, dtype=torch.float32)
    ours, plain = (lambda *t, f=f: f(*t, numbers) for f in (fused_conv_silu, causal_conv_silu))
    compare(ours, plain, [x, weight, bias])


def scan_tensors(batch: int, length: int) -> list[Tensor]:
    heads, groups, width, state = 8, 2, 64, 128
    return [
        randn(batch, length, heads, width),
        randn(batch, length, heads),
        (-torch.rand(heads, device="cuda") * 4 - 0.5).requires_grad_(),
        randn(batch, length, groups, state, scale=0.3),
        randn(batch, length, groups, state, scale=0.3),
        randn(heads, dtype=torch.float32),
        randn(heads, dtype=torch.float32),
    ]


@pytest.mark.parametrize("lengths", [LENGTHS, ODD])
def test_scan(lengths: list[list[int]]) -> None:
    numbers = numbers_of(lengths)
    ours, plain = (lambda *t, f=f: f(ScanInputs(*t), 128, numbers) for f in (fused_scan, plain_scan))
    compare(ours, plain, scan_tensors(*numbers.shape), tolerance=2e-2)


@pytest.mark.parametrize("function", [attend, attend_fused])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("lengths", "dim"), [(LENGTHS, 64), (ODD, 128), (ODD, 36)])
def test_attention(function, deterministic: bool, lengths: list[list[int]], dim: int) -> None:
    documents = Documents(numbers_of(lengths))
    tensors = [randn(*documents.numbers.shape, heads, dim) for heads in (8, 2, 2)]
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    compare(lambda *t: function(*t, documents), lambda *t: attend(*t, documents), tensors, 2e-2)
    if deterministic:
        dy = torch.randn_like(tensors[0])
        runs = [torch.autograd.grad(function(*tensors, documents), tensors, dy) for _ in range(8)]
        assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


def spans(lengths: list[list[int]]) -> list[tuple[int, slice]]:
    return [(row, slice(sum(own[:i]), sum(own[: i + 1]))) for row, own in enumerate(lengths) for i in range(len(own))]


def test_fused_logits_of_a_document_are_those_of_the_document_alone(mesh) -> None:
    model, lengths = model_of(fused(), mesh), [[100, 156], [28, 228]]
    tokens = text()[0][:2]
    with torch.no_grad():
        logits, joined = model(tokens, documents=numbers_of(lengths)), model(tokens)
        for row, span in spans(lengths):
            alone = model(tokens[row : row + 1, span])
            assert relative_error(logits[row : row + 1, span], alone) < 2e-2
            if span.start:  # what comes before changes it: far less in an untrained model than in a trained one
                assert relative_error(joined[row : row + 1, span], alone) > 6e-2


def test_told_their_number_the_host_never_waits(mesh) -> None:
    model, (tokens, targets) = model_of(fused(), mesh), text()
    numbers = numbers_of([[100, 28, 1, 127], [256], [128, 128], [1] * 256])
    assert int((numbers[:, -1] + 1).sum()) == 4 + 1 + 2 + 256
    waits = []
    for options in ({}, {"documents": numbers, "num_documents": 263}, {"documents": numbers}):
        model(tokens, targets, **options).backward()  # compiles, tunes
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model(tokens, targets, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(warning.message) for warning in caught))
    _, told, not_told = waits
    assert told == 0 < not_told, waits
