"""Each mixer against its formula in FP64, with weights in the row order of published checkpoints."""

import pytest
import torch
import torch.nn.functional as F

from models.attention import qkv_order
from models.mamba2 import mamba_conv_order, mamba_in_proj_order
from models.mlp import gate_up_order
from models.positions import apply_rope, rope_tables
from tests.models.builders import build, fp64_parameters, local, relative_error, small_config, ssd_recurrence


def compare(mixer, reference, config, length, tolerance=1e-5):
    """Compare values and gradients of two sequences with those of `reference` in FP64."""
    x = torch.randn(2 * length, config.hidden_dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x64, weights = x.detach().double().requires_grad_(), fp64_parameters(mixer)
    y, expected = mixer(x, length), reference(x64, weights, config, length)
    y.sin().sum().backward()
    expected.sin().sum().backward()
    assert relative_error(y, expected) < 1e-5
    assert relative_error(x.grad, x64.grad) < 1e-5
    for name, parameter in mixer.named_parameters():
        assert relative_error(local(parameter.grad), weights[name].grad) < tolerance, name


def attention_reference(x, weights, config, length):
    """Softmax attention by its formula, with weights in the published order."""
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


@pytest.mark.parametrize(("kv_heads", "rope"), [(1, True), (2, False), (4, True)])
def test_attention_equals_its_formula(mesh, kv_heads, rope):
    config = small_config(pattern="*", num_kv_heads=kv_heads, rope=rope, init_std=0.2)
    mixer = build(config, mesh).blocks[0].mixer
    compare(mixer, attention_reference, config, 11)


def mamba_reference(x, weights, config, length):
    """Mamba-2 by its formulas, with the recurrence instead of the scan, and weights in the published order."""
    in_weight = weights["in_proj.weight"][mamba_in_proj_order(config).argsort()]
    channels = mamba_conv_order(config).argsort()
    conv_weight, conv_bias = weights["conv.weight"][channels], weights["conv.bias"][channels]
    inner, groups, state, heads = (
        config.mamba_inner_dim,
        config.mamba_num_groups,
        config.mamba_num_groups * config.mamba_state_dim,
        config.mamba_num_heads,
    )
    projected = (x @ in_weight.t()).view(-1, length, in_weight.shape[0])
    z, xbc, dt = projected.split([inner, inner + 2 * state, heads], -1)
    padded = F.pad(xbc.transpose(1, 2), (config.mamba_conv_width - 1, 0))
    xbc = F.silu(F.conv1d(padded, conv_weight[:, None], conv_bias, groups=xbc.shape[-1])).transpose(1, 2)
    xs, b, c = xbc.split([inner, state, state], -1)
    xs, b, c = xs.unflatten(-1, (heads, -1)), b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))
    dt = F.softplus(dt + weights["ssm.dt_bias"])
    y = ssd_recurrence(xs, dt, -weights["ssm.A_log"].exp(), b, c) + weights["ssm.D"][:, None] * xs
    gated = (y.flatten(2) * F.silu(z)).unflatten(-1, (groups, -1))
    normed = gated / (gated.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    return (normed.flatten(2) * weights["norm.weight"]).flatten(0, 1) @ weights["out_proj.weight"].t()


@pytest.mark.parametrize(("groups", "length", "width"), [(1, 19, 1), (2, 8, 4), (4, 2, 4)])
def test_mamba2_equals_its_formula(mesh, groups, length, width):
    config = small_config(pattern="M", mamba_num_groups=groups, mamba_conv_width=width, init_std=0.2)
    mixer, generator = build(config, mesh).blocks[0].mixer, torch.Generator().manual_seed(3)
    for weight in (mixer.norm.weight, mixer.ssm.D):  # initialization sets them to one
        local(weight.data).copy_(torch.rand(weight.shape, generator=generator) + 0.5)
    compare(mixer, mamba_reference, config, length, tolerance=1e-4)


def ffn_reference(x, weights, config, length):
    return (x @ weights["up_proj.weight"].t()).relu().square() @ weights["down_proj.weight"].t()


def gated_reference(x, weights, config, length):
    gate, up = (x @ weights["gate_up_proj.weight"][gate_up_order(config).argsort()].t()).chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ weights["down_proj.weight"].t()


@pytest.mark.parametrize(
    ("pattern", "width", "reference"),
    [("-", 48, ffn_reference), ("G", 48, gated_reference), ("G", 256, gated_reference)],
)
def test_ffns_equal_their_formulas(mesh, pattern, width, reference):
    config = small_config(pattern=pattern, ffn_dim=width)
    compare(build(config, mesh).blocks[0].mixer, reference, config, 5)
