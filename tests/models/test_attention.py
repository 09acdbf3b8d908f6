import pytest
import torch

from models.attention import Attention, qkv_order
from models.positions import apply_rope, rope_tables
from tests.models.builders import build, fp64_parameters, local, relative_error, small_config


def reference(x, weights, config, length):
    """Softmax attention written out, over weights in the published order."""
    qkv_weight = weights["qkv_proj.weight"][qkv_order(config).argsort()]
    q_dim, kv_dim = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, v = (x @ qkv_weight.t()).view(-1, length, qkv_weight.shape[0]).split([q_dim, kv_dim, kv_dim], -1)
    q, k, v = (t.unflatten(-1, (-1, config.head_dim)) for t in (q, k, v))
    if config.rope:
        cos, sin = (t.to(x.dtype) for t in rope_tables(length, config.head_dim, config.rope_base, "cpu"))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    repeats = config.num_query_heads // config.num_kv_heads
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * config.head_dim**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    y = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)
    return y.flatten(2).flatten(0, 1) @ weights["out_proj.weight"].t()


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_attention_written_out(mesh, kv_heads, rope):
    config = small_config(pattern="*", num_kv_heads=kv_heads, rope=rope, init_std=0.2)
    mixer = build(config, mesh).blocks[0].mixer
    x = torch.randn(2 * 11, config.hidden_dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x64, weights = x.detach().double().requires_grad_(), fp64_parameters(mixer)
    y, expected = mixer(x, 11), reference(x64, weights, config, 11)
    y.sin().sum().backward()
    expected.sin().sum().backward()
    assert relative_error(y, expected) < 1e-5
    assert relative_error(x.grad, x64.grad) < 1e-5
    for name, parameter in mixer.named_parameters():
        assert relative_error(local(parameter.grad), weights[name].grad) < 1e-5, name


def test_is_causal_and_keeps_sequences_apart(mesh):
    config = small_config(pattern="*")
    mixer = build(config, mesh).blocks[0].mixer
    x = torch.randn(2 * 8, config.hidden_dim, generator=torch.Generator().manual_seed(0))
    y = mixer(x, 8)
    x[5:8] += 1
    changed = (mixer(x, 8) != y).any(-1)
    assert changed.tolist() == [5 <= t < 8 for t in range(16)]


def test_heads_must_divide(mesh):
    with pytest.raises(ValueError, match=r"num_query_heads=4 is not a multiple of model.num_kv_heads=3"):
        Attention(small_config(num_kv_heads=3), mesh)
