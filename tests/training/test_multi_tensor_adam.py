"""The multi-tensor AdamW around a kernel written in PyTorch; the packages' own kernels are tried under tests/gpu."""

import pytest
import torch
from torch import nn

from megatron_fp4.config.schema import ConfigError, OptimizerConfig
from megatron_fp4.training.multi_tensor_adam import MultiTensorAdamW
from megatron_fp4.training.optimizer import _create_moments, build_optimizer, optimizer_state, parameter_groups


def applier(kernel, overflow, lists, *rest):
    kernel(2048, overflow, lists, *rest)


def kernel(chunk, overflow, lists, lr, beta1, beta2, eps, step, mode, bias_correction, decay):
    assert mode == bias_correction == 1 and all(len(tensors) == len(lists[0]) for tensors in lists)
    for gradient, parameter, moment, square in zip(*lists, strict=True):
        moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = moment / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + eps)
        parameter.sub_(lr * (update + decay * parameter))


CONFIG = OptimizerConfig(lr=0.1, weight_decay=0.3)


def build(model: nn.Module) -> MultiTensorAdamW:
    groups = parameter_groups(model, CONFIG.weight_decay)
    betas = (CONFIG.beta1, CONFIG.beta2)
    optimizer = MultiTensorAdamW(groups, lr=CONFIG.lr, betas=betas, eps=CONFIG.eps, applier=applier, kernel=kernel)
    _create_moments(optimizer, step_on_host=True)
    return optimizer


def test_updates_are_adamws_and_states_have_its_names():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizer, reference = build(ours), build_optimizer(theirs, CONFIG).optimizer
    for _ in range(4):
        x = torch.randn(7, 5)
        for model, updater in ((ours, optimizer), (theirs, reference)):
            model(x).square().mean().backward()
            updater.step()
            updater.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)
    mine, other = optimizer_state(ours, optimizer), optimizer_state(theirs, reference)
    assert mine.keys() == other.keys()
    assert all(mine[name].shape == other[name].shape and mine[name].dtype == other[name].dtype for name in mine)
    # A checkpoint is loaded by writing into these tensors, whichever implementation wrote it.
    for name, value in mine.items():
        value.copy_(other[name])
    assert all(state["step"] == 4 for state in optimizer.state.values())


def test_parameters_without_a_gradient_keep_their_step():
    model = nn.Linear(5, 3)
    optimizer = build(model)
    model.weight.grad = torch.ones_like(model.weight)
    before = model.bias.detach().clone()
    optimizer.step()
    assert torch.equal(model.bias, before) and optimizer.state[model.bias]["step"] == 0
    model.bias.grad = torch.ones_like(model.bias)
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 2 and optimizer.state[model.bias]["step"] == 1


@pytest.mark.parametrize("implementation", ["transformer_engine", "apex"])
def test_a_choice_that_cannot_run_is_refused(implementation):
    with pytest.raises(ConfigError, match=f"optimizer.implementation={implementation} cannot run"):
        build_optimizer(nn.Linear(2, 2), OptimizerConfig(implementation=implementation))
