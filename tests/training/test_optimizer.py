from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from megatron_fp4.config.schema import OptimizerConfig, ScheduleConfig
from megatron_fp4.training.optimizer import WSDSchedule, build_optimizer, parameter_groups

PEAK = 3e-4


class AllKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 2, groups=4)
        self.norm = nn.LayerNorm(4)
        self.A_log = nn.Parameter(torch.zeros(4))
        self.table_bias = nn.Parameter(torch.zeros(4, 4))
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def test_biases_and_1d_parameters_are_not_decayed() -> None:
    model = AllKinds()
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, others = parameter_groups(model, weight_decay=0.1)
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert {names[p] for p in decayed["params"]} == {"embedding.weight", "linear.weight", "conv.weight"}  # type: ignore[attr-defined]
    assert {names[p] for p in others["params"]} == {  # type: ignore[attr-defined]
        "linear.bias", "conv.bias", "norm.weight", "norm.bias", "A_log", "table_bias",
    }  # fmt: skip


def test_updates_are_those_of_torch_with_the_settings_of_the_configuration() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(lr=0.1, beta1=0.8, beta2=0.7, eps=0.01, weight_decay=0.0)  # none of them a default
    optimizer = build_optimizer(ours, config)
    settings = {"lr": 0.1, "betas": (0.8, 0.7), "eps": 0.01, "weight_decay": 0.0, "fused": True}
    reference = torch.optim.AdamW(theirs.parameters(), **settings)  # type: ignore[arg-type]
    for _ in range(3):
        x = torch.randn(7, 5)
        for model, updater in ((ours, optimizer), (theirs, reference)):
            model(x).square().mean().backward()
            updater.step()
            updater.zero_grad()
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)


def schedule(num_steps: int = 1000, **changes: object) -> WSDSchedule:
    return WSDSchedule(ScheduleConfig(**changes), PEAK, num_steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("decay", get_args(get_type_hints(ScheduleConfig)["decay"]))
def test_warmup_stable_decay(decay: str) -> None:
    for num_steps in (1, 2, 7, 600):
        wsd = schedule(num_steps, decay=decay)
        rates = [wsd.lr(step) for step in range(num_steps)]
        assert rates[-1] == PEAK * 0.01 and all(rate > 0 for rate in rates)
        warmup, decaying = rates[: wsd.warmup_steps], rates[wsd.decay_start_step :]
        assert warmup == [pytest.approx(PEAK * (step + 1) / len(warmup)) for step in range(len(warmup))]
        assert all(rate == PEAK for rate in [*warmup[-1:], *rates[wsd.warmup_steps : wsd.decay_start_step]])
        assert decaying[0] < PEAK and decaying == sorted(decaying, reverse=True)


def test_boundaries_of_the_schedule_and_rewarming_after_a_switch() -> None:
    wsd = schedule(600, warmup_fraction=0.02, decay_fraction=0.15)
    assert (wsd.warmup_steps, wsd.decay_start_step) == (12, 510)
    wsd = schedule(100, decay_fraction=0.2)
    assert wsd.lr(49, switched_at=50, rewarm_steps=4) == PEAK
    assert [wsd.lr(step, 50, 4) for step in range(50, 55)] == [PEAK * f for f in (0.25, 0.5, 0.75, 1.0, 1.0)]
    assert wsd.lr(50, switched_at=50) == PEAK
    assert wsd.lr(82, 82, 2) == wsd.lr(82) / 2
