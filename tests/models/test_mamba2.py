import pytest
import torch
import torch.nn.functional as F

from models.mamba2 import Mamba2, mamba_conv_order, mamba_in_proj_order
from tests.models.builders import build, fp64_parameters, local, relative_error, small_config
from tests.models.recurrence import ssd_recurrence


def reference(x, weights, config, length):
    """The mixer written out, over weights in the published order, with the recurrence instead of the scan."""
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


def randomize(mixer):
    """Weights that initialization sets to one become distinguishable."""
    generator = torch.Generator().manual_seed(3)
    for weight in (mixer.norm.weight, mixer.ssm.D):
        weight.data.to_local().copy_(torch.rand(weight.shape, generator=generator) + 0.5)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("length", [5, 8, 19])
def test_equals_the_mixer_written_out(mesh, groups, length):
    config = small_config(pattern="M", mamba_num_groups=groups, init_std=0.2)
    mixer = build(config, mesh).blocks[0].mixer
    randomize(mixer)
    x = torch.randn(2 * length, config.hidden_dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x64, weights = x.detach().double().requires_grad_(), fp64_parameters(mixer)
    y, expected = mixer(x, length), reference(x64, weights, config, length)
    y.sin().sum().backward()
    expected.sin().sum().backward()
    assert relative_error(y, expected) < 1e-5
    assert relative_error(x.grad, x64.grad) < 1e-5
    for name, parameter in mixer.named_parameters():
        assert relative_error(local(parameter.grad), weights[name].grad) < 1e-4, name


def test_is_causal_and_keeps_sequences_apart(mesh):
    config = small_config(pattern="M")
    mixer = build(config, mesh).blocks[0].mixer
    x = torch.randn(2 * 12, config.hidden_dim, generator=torch.Generator().manual_seed(0))
    y = mixer(x, 12)
    x[7:12] += 1
    changed = ((mixer(x, 12) - y).abs() > 1e-6).any(-1)
    assert changed.tolist() == [7 <= t < 12 for t in range(24)]


def test_both_projections_run_as_layers(mesh):
    mixer = build(small_config(pattern="M"), mesh).blocks[0].mixer
    called = []
    for name in ("in_proj", "out_proj"):
        getattr(mixer, name).register_forward_hook(lambda *_, name=name: called.append(name))
    mixer(torch.randn(8, 32), 8)
    assert called == ["in_proj", "out_proj"]


def test_ssm_parameters_are_reached_through_their_module(mesh):
    mixer = build(small_config(pattern="M"), mesh).blocks[0].mixer
    called = []
    mixer.ssm.register_forward_hook(lambda *_: called.append("ssm"))
    mixer(torch.randn(8, 32), 8)
    assert called == ["ssm"]


def test_heads_must_divide(mesh):
    with pytest.raises(ValueError, match=r"mamba_num_heads=4 is not a multiple of model.mamba_num_groups=3"):
        Mamba2(small_config(mamba_num_groups=3), mesh)
