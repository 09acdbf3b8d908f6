"""Masked documents: every document of a row comes out as it does alone, by plain and fused paths."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from models.conv import causal_conv_silu, fused_conv_silu
from models.execution import Execution
from models.hybrid import HybridModel, build_model
from models.initialization import initialize
from models.positions import Documents, apply_rope, rope_tables
from models.sdpa import attend, attend_fused
from models.ssd import fused_scan, ssd_scan
from tests.models import fused_stand_ins
from tests.models.builders import build, local, relative_error, small_config

# Chunks of the scan are 8 tokens: boundaries at their ends, in their middle, several in one, and of length 1.
LENGTHS = [[5, 1, 1, 9, 5], [21], [1] * 21, [8, 8, 5], [20, 1], [1, 20], [3, 12, 6]]


def numbers_of(lengths: list[list[int]]) -> Tensor:
    """int32 [rows, sum of lengths]."""
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return torch.stack(rows).to(torch.int32)


def spans(lengths: list[list[int]]) -> list[tuple[int, slice]]:
    """(row, its tokens) of every document."""
    found = []
    for row, own in enumerate(lengths):
        ends = list(itertools.accumulate(own))
        found += [(row, slice(end - length, end)) for end, length in zip(ends, own, strict=True)]
    return found


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_where_documents_begin():
    lengths = [[3, 1, 2], [6], [1, 4, 1]]
    documents = Documents(numbers_of(lengths))
    assert documents.positions.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 0]]
    assert documents.boundaries.tolist() == [0, 3, 4, 6, 12, 13, 17, 18]
    assert documents.boundaries.dtype == documents.numbers.dtype == torch.int32
    assert torch.equal(Documents(numbers_of(lengths), 7).boundaries, documents.boundaries)
    # Numbers may begin anywhere and leave some out.
    assert torch.equal(Documents(numbers_of(lengths) * 3 + 2).boundaries, documents.boundaries)
    for row, q, k in itertools.product(range(3), range(6), range(6)):
        own = next(span for r, span in spans(lengths) if r == row and span.start <= q < span.stop)
        assert documents.mask[row, 0, q, k] == (own.start <= k <= q)


def same_as_alone(function, tensors: list[Tensor], lengths: list[list[int]], *, shared: int = 0):
    """Value and gradients of `function(*tensors, documents)`, each row of `lengths`, against each document by itself.

    The last `shared` tensors are parameters; their gradients are sums over documents.
    """
    tensors = [t.requires_grad_() for t in tensors]
    own, parameters = tensors[: len(tensors) - shared], tensors[len(tensors) - shared :]
    y = function(*tensors, numbers_of(lengths))
    weights = randn(*y.shape, seed=7).to(y.dtype)
    actual = torch.autograd.grad((y * weights).sum(), tensors)
    totals = [torch.zeros_like(p) for p in parameters]
    equal = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)
    for row, span in spans(lengths):
        alone = [t[row : row + 1, span].detach().requires_grad_() for t in own]
        expected = function(*alone, *parameters, None)
        equal(y[row : row + 1, span], expected)
        gradients = torch.autograd.grad((expected * weights[row : row + 1, span]).sum(), [*alone, *parameters])
        for a, e in zip(actual, gradients[: len(own)], strict=False):
            equal(a[row : row + 1, span], e)
        for total, gradient in zip(totals, gradients[len(own) :], strict=True):
            total += gradient
    for a, e in zip(actual[len(own) :], totals, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution(width):
    same_as_alone(causal_conv_silu, [randn(len(LENGTHS), 21, 6), randn(6, width), randn(6)], LENGTHS, shared=2)


def scan_inputs(batch: int, length: int, dt_max: float = 0.5) -> list[Tensor]:
    heads, groups, state = 4, 2, 3
    dt = randn(batch, length, heads, seed=3).abs() * dt_max + 1e-3
    b, c = (randn(batch, length, groups, state, seed=seed) for seed in (4, 5))
    return [randn(batch, length, heads, 5, seed=2), dt, b, c, -randn(heads, seed=6).abs() * 5 - 0.1]


def scan(chunk_size: int):
    return lambda x, dt, b, c, a, documents: ssd_scan(x, dt, a, b, c, chunk_size, documents)


@pytest.mark.parametrize("chunk_size", [1, 4, 8, 64])
def test_scan(chunk_size):
    same_as_alone(scan(chunk_size), scan_inputs(len(LENGTHS), 21), LENGTHS, shared=1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention(kv_heads):
    tensors = [randn(len(LENGTHS), 21, heads, 8, seed=heads) for heads in (4, kv_heads, kv_heads)]
    same_as_alone(lambda q, k, v, n: attend(q, k, v, None if n is None else Documents(n)), tensors, LENGTHS)


def test_rope_has_the_same_bits():
    x, numbers = randn(len(LENGTHS), 21, 3, 8), numbers_of(LENGTHS)
    y = apply_rope(x, *Documents(numbers).rope_tables(8, 100.0))
    for row, span in spans(LENGTHS):
        tables = rope_tables(span.stop - span.start, 8, 100.0, "cpu")
        assert torch.equal(y[row : row + 1, span], apply_rope(x[row : row + 1, span], *tables))


def model_and_text(mesh: Any, pattern: str, lengths: list[list[int]], **changes: Any) -> tuple[HybridModel, Tensor]:
    config = small_config(pattern=pattern, rope=True, init_std=0.2, **changes)
    rows, length = len(lengths), sum(lengths[0])
    text = torch.randint(0, config.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return build(config, mesh, seed=3), text


@pytest.mark.parametrize("pattern", ["M", "*", "-", "M-*-M-", "*M*M", "MMM", "**-"])
def test_logits_of_a_document_are_those_of_the_document_alone(mesh, pattern):
    model, text = model_and_text(mesh, pattern, LENGTHS)
    with torch.no_grad():
        logits = model(text[:, :-1], documents=numbers_of(LENGTHS))
        joined = model(text[:, :-1])
        for row, span in spans(LENGTHS):
            alone = model(text[row : row + 1, span])
            torch.testing.assert_close(logits[row : row + 1, span], alone, rtol=2e-4, atol=2e-4)
    if {*pattern} != {"-"}:
        assert (logits - joined).abs().max() > 0.05
    # A row that is one document is what it was.
    torch.testing.assert_close(logits[1], joined[1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("pattern", ["M", "*", "M-*-M-"])
def test_gradients_are_those_of_the_documents_alone(mesh, pattern):
    """Of a mean over all tokens, the mean over documents weighted by their lengths."""
    lengths = LENGTHS[:1] + LENGTHS[3:5]
    model, text = model_and_text(mesh, pattern, lengths)
    tokens, targets = text[:, :-1], text[:, 1:]
    model(tokens, targets, numbers_of(lengths)).backward()
    together = {name: local(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for row, span in spans(lengths):
        share = (span.stop - span.start) / tokens.numel()
        (model(tokens[row : row + 1, span], targets[row : row + 1, span]) * share).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], local(parameter.grad), rtol=1e-3, atol=2e-6, msg=name)


@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_recomputation_changes_no_bit(mesh, recompute):
    config = small_config(rope=True)
    text = model_and_text(mesh, "M", LENGTHS)[1]
    gradients = []
    for how in ("none", recompute):
        model = build_model(config, mesh, torch.bfloat16, Execution(recompute=how))
        initialize(model, config, 0)
        model(text[:, :-1], text[:, 1:], numbers_of(LENGTHS)).backward()
        gradients.append([local(p.grad) for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


CONFIG = small_config(rope=True, mamba_chunk_size=16, mamba_state_dim=8, init_std=0.2)


def as_it_is(function):
    return function


def fused_on_a_cpu(recompute: str = "none") -> Execution:
    """The choices of a GPU, but for what only a GPU can compile."""
    from megatron_fp4.parallel.cross_entropy import head_cross_entropy

    def loss(*inputs, fused, **settings):
        assert fused
        return head_cross_entropy(*inputs, **settings)

    return Execution({"scan": fused_scan, "conv": fused_conv_silu, "loss": loss}, compile=as_it_is, recompute=recompute)


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_the_model_gives_every_kernel_what_it_demands(mesh, monkeypatch, recompute):
    calls = fused_stand_ins.install(monkeypatch)
    text = torch.randint(0, CONFIG.vocab_size, (len(LENGTHS), 22), generator=torch.Generator().manual_seed(1))
    losses, gradients = [], []
    for execution in (fused_on_a_cpu(recompute), Execution()):
        model = build_model(CONFIG, mesh, torch.bfloat16, execution)
        initialize(model, CONFIG, 0)
        loss = model(text[:, :-1], text[:, 1:], numbers_of(LENGTHS))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: local(p.grad) for name, p in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    for name, gradient in gradients[1].items():
        # Of A, most of the parts cancel, and BF16 rounds each.
        assert relative_error(gradients[0][name], gradient) < (0.15 if name.endswith("A_log") else 5e-2), name
    again = 1 if recompute == "none" else 2
    assert calls["scan"] == calls["conv"] == 2 * again  # of two Mamba-2 blocks
    assert calls["attention"] == (2 if recompute == "block" else 1)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (4, 2, 16), (6, 2, 20)])
def test_attention_within_documents(monkeypatch, heads, kv_heads, dim):
    """Also with a head dimension that has to be padded."""
    fused_stand_ins.install(monkeypatch)
    documents = Documents(numbers_of(LENGTHS))
    shapes = [(len(LENGTHS), 21, count, dim) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes))
    tensors = [t.bfloat16().requires_grad_() for t in (q, k, v)]
    y, expected = attend_fused(*tensors, documents), attend(*(t.float() for t in tensors), documents)
    assert y.shape == expected.shape and relative_error(y, expected) < 1e-2
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9))
    ours, reference = (torch.autograd.grad(out, tensors, dy.to(out.dtype)) for out in (y, expected))
    for a, b in zip(ours, reference, strict=True):
        assert relative_error(a, b) < 2e-2


@pytest.mark.parametrize("deterministic", [False, True])
def test_pytorchs_own_kernel_takes_it_and_can_be_made_deterministic(deterministic):
    """On the meta device, which has shapes and autograd: arguments, result, and where the backward pass hangs."""
    documents = Documents(torch.zeros(2, 64, dtype=torch.int32, device="meta"), 5)
    assert documents.boundaries.shape == (6,) and documents.boundaries.dtype == torch.int32
    q, k, v = (
        torch.empty(2, 64, heads, 20, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (8, 2, 2)
    )
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    seen: list[bool] = []
    try:
        y = attend_fused(q, k, v, documents)
        assert y.shape == q.shape
        node = y.grad_fn
        while "FlashAttention" not in node.name():
            node = node.next_functions[0][0]
        node.register_prehook(lambda _: seen.append(torch.is_deterministic_algorithms_warn_only_enabled()))
        y.backward(torch.empty_like(y))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert k.grad is not None and k.grad.shape == k.shape
    assert seen == [not deterministic], "with warn_only, attention's backward pass warns and stays as it was"
