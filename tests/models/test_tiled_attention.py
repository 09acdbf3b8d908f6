"""Deterministic attention without a GPU: which models it takes, what its kernels are given, and that autograd and
recomputation do not mind. The kernels themselves: tests/gpu/test_tiled_attention.py."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.config.compose import compose_config
from models import sdpa
from models.execution import Execution
from models.hybrid import build_model
from models.initialization import initialize
from models.positions import Documents
from models.sdpa import HEAD_DIMS, KERNELS, attend, attend_in_tiles, tiles_refusal
from tests.models.builders import local, relative_error, small_config
from tests.models.test_documents import LENGTHS, numbers_of

CONFIG = small_config(pattern="*-*", rope=True, head_dim=16, init_std=0.2)
CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))


@pytest.fixture(autouse=True)
def determinism():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Stand-ins for the kernels that refuse what they cannot read, and compute by plain PyTorch."""
    made: list[str] = []

    def seen(begins: Tensor | None, length: int) -> Tensor:
        """By `begins` alone, as the forward kernel knows it."""
        places = torch.arange(length)
        past = places <= places[:, None]
        if begins is None:
            return past
        assert begins.dtype == torch.int32 and begins.is_contiguous()
        return (past & (places >= begins[..., None]))[:, None]

    def plain(q: Tensor, k: Tensor, v: Tensor, begins: Tensor | None) -> tuple[Tensor, Tensor]:
        assert all(t.is_contiguous() and t.shape[:2] == q.shape[:2] for t in (q, k, v)) and q.shape[3] in HEAD_DIMS
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = (q.float() @ k.float().mT) * q.shape[3] ** -0.5
        scores = scores.masked_fill(~seen(begins, q.shape[2]), -torch.inf)
        return (scores.softmax(-1) @ v.float()).transpose(1, 2).contiguous(), scores.logsumexp(-1)

    def forward(q: Tensor, k: Tensor, v: Tensor, tiles: Any, begins: Tensor | None = None) -> tuple[Tensor, Tensor]:
        made.append("forward")
        assert tiles == KERNELS[q.shape[3]].forward
        y, sums = plain(q, k, v, begins)
        return y.to(q.dtype), sums

    def backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, *bounds: Any) -> Any:
        made.append("backward")
        of_dq, of_keys, begins, ends = bounds
        assert (of_dq, of_keys) == KERNELS[q.shape[3]][1:]
        assert dy.is_contiguous() and dy.shape == y.shape == q.shape and sums.shape == (len(q), q.shape[2], q.shape[1])
        if begins is not None:
            by_query, places = seen(begins, q.shape[1])[:, 0], torch.arange(q.shape[1])
            by_key = (places[:, None] >= places) & (places[:, None] < ends[:, None, :])
            assert torch.equal(by_query, by_key), "both kernels see the same pairs"
        with torch.enable_grad():
            tensors = [t.detach().requires_grad_() for t in (q, k, v)]
            return torch.autograd.grad(plain(*tensors, begins)[0], tensors, dy.float())

    module: Any = ModuleType("models.attention_triton")
    module.forward, module.backward = forward, backward
    monkeypatch.setitem(sys.modules, "models.attention_triton", module)
    monkeypatch.setattr(sys.modules["models"], "attention_triton", module, raising=False)
    return made


@pytest.mark.parametrize("name", MODELS)
def test_every_shipped_model_is_taken(name: str) -> None:
    """On any mesh: tensor parallelism shares heads, which may be any number."""
    assert tiles_refusal(compose_config([f"model={name}"], CONFIGS).model, 1) is None


def test_tiles_are_such_as_the_kernels_demand() -> None:
    for dim, kernels in KERNELS.items():
        assert all(size & (size - 1) == 0 and size >= 16 for size in (dim, *(n for tile in kernels for n in tile[:2])))
        assert kernels.dkdv[1] % kernels.dkdv[0] == 0
        # The range of keys that every query sees ends where the tile of queries begins.
        assert all(queries % keys == 0 for queries, keys, *_ in (kernels.forward, kernels.dq))


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_plain_attention(calls, masked) -> None:
    documents = Documents(numbers_of(LENGTHS)) if masked else None
    shapes = [(len(LENGTHS), 21, count, 16) for count in (4, 2, 2)]
    tensors = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(shapes)]
    tensors = [t.requires_grad_() for t in tensors]
    y, expected = (function(*tensors, documents) for function in (attend_in_tiles, attend))
    torch.testing.assert_close(y, expected)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9))
    for ours, theirs in zip(*(torch.autograd.grad(out, tensors, dy) for out in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert calls == ["forward", "backward"]


def test_without_determinism_whole_rows_go_to_cudnn(calls, monkeypatch) -> None:
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(sdpa, "attend_fused", lambda q, *_: q)
    q = torch.zeros(1, 4, 2, 16)
    assert attend_in_tiles(q, q, q) is q and calls == []
    attend_in_tiles(q, q, q, Documents(torch.zeros(1, 4, dtype=torch.int32)))
    assert calls == ["forward"]


def test_selective_recomputation_keeps_no_rotated_heads(mesh, calls, monkeypatch) -> None:
    """They are promised (models/execution.py): what the backward pass needs of them is made again."""
    kernels: Any = sys.modules["models.attention_triton"]
    forward, seen = kernels.forward, []
    monkeypatch.setattr(kernels, "forward", lambda q, *rest: (seen.append(weakref.ref(q)), forward(q, *rest))[1])
    for recompute in ("none", "selective"):
        execution = Execution({"attention": attend_in_tiles}, compile=lambda f: f, recompute=recompute)
        block = build_model(CONFIG, mesh, torch.bfloat16, execution).blocks[0]
        h = torch.zeros(22, CONFIG.hidden_dim, dtype=torch.bfloat16, requires_grad=True)
        y = block(h, 11)
        gc.collect()
        assert (seen.pop()() is None) == (recompute == "selective")
        del y


@pytest.mark.parametrize("masked", [False, True])
def test_recomputation_changes_no_bit_and_runs_it_again_only_in_whole_blocks(mesh, calls, masked) -> None:
    text = torch.randint(0, CONFIG.vocab_size, (len(LENGTHS), 22), generator=torch.Generator().manual_seed(1))
    gradients, runs = [], []
    for recompute in ("none", "selective", "block"):
        execution = Execution({"attention": attend_in_tiles}, compile=lambda f: f, recompute=recompute)
        model = build_model(CONFIG, mesh, torch.bfloat16, execution)
        initialize(model, CONFIG, 0)
        calls.clear()
        model.execution = Execution(recompute=recompute)  # the loss in plain PyTorch
        model(text[:, :-1], text[:, 1:], numbers_of(LENGTHS) if masked else None).backward()
        gradients.append({name: local(p.grad) for name, p in model.named_parameters()})
        runs.append((calls.count("forward"), calls.count("backward")))
    assert runs == [(2, 2), (2, 2), (4, 2)]
    plain = build_model(CONFIG, mesh, torch.bfloat16, Execution())
    initialize(plain, CONFIG, 0)
    plain(text[:, :-1], text[:, 1:], numbers_of(LENGTHS) if masked else None).backward()
    for name, p in plain.named_parameters():
        assert all(torch.equal(gradients[0][name], others[name]) for others in gradients[1:]), name
        assert relative_error(gradients[0][name], local(p.grad)) < 5e-2, name
