import torch

from models.mlp import squared_relu
from tests.models.builders import build, fp64_parameters, local, relative_error, small_config


def test_squared_relu():
    x = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64, requires_grad=True)
    assert squared_relu(x).tolist() == [0.0, 0.0, 9.0]
    assert torch.autograd.grad(squared_relu(x).sum(), x)[0].tolist() == [0.0, 0.0, 6.0]


def test_equals_fp64_in_value_and_gradients(mesh):
    config = small_config(pattern="-")
    mixer = build(config, mesh).blocks[0].mixer
    x = torch.randn(10, config.hidden_dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x64, weights = x.detach().double().requires_grad_(), fp64_parameters(mixer)
    y = mixer(x, 5)
    expected = (x64 @ weights["up_proj.weight"].t()).relu().square() @ weights["down_proj.weight"].t()
    y.sin().sum().backward()
    expected.sin().sum().backward()
    assert relative_error(y, expected) < 1e-6
    assert relative_error(x.grad, x64.grad) < 1e-6
    for name, parameter in mixer.named_parameters():
        assert relative_error(local(parameter.grad), weights[name].grad) < 1e-6, name
