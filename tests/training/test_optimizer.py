import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fp4.config.schema import OptimizerConfig
from megatron_fp4.precision.rng import StepState
from megatron_fp4.training.optimizer import build_optimizer, optimizer_state, parameter_groups
from tests.training.harness import alone, launch, toy, toy_batches, toy_mesh, train_step, whole


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 2, groups=4)
        self.norm = nn.LayerNorm(4)
        self.A_log = nn.Parameter(torch.zeros(4))
        self.table_bias = nn.Parameter(torch.zeros(4, 4))
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def test_what_is_decayed() -> None:
    model = Everything()
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, others = parameter_groups(model, weight_decay=0.1)
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert {names[p] for p in decayed["params"]} == {"embedding.weight", "linear.weight", "conv.weight"}  # type: ignore[attr-defined]
    assert {names[p] for p in others["params"]} == {  # type: ignore[attr-defined]
        "linear.bias", "conv.bias", "norm.weight", "norm.bias", "A_log", "table_bias",
    }  # fmt: skip


def test_moments_from_the_start_change_nothing() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, OptimizerConfig(lr=0.1, weight_decay=0.0))
    reference = torch.optim.AdamW(
        theirs.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )
    for _ in range(3):
        x = torch.randn(7, 5)
        for model, updater in ((ours, optimizer), (theirs, reference)):
            model(x).square().mean().backward()
            updater.step()
            updater.zero_grad()
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)


def test_state_names_and_placement() -> None:
    with alone() as mesh:
        model, optimizer = toy(mesh, on_tp=True)
        state = optimizer_state(model, optimizer)
        weight = dict(model.named_parameters())["blocks.0.up.weight"]
        moment = state["blocks.0.up.weight.exp_avg_sq"]
        assert len(state) == 3 * len(list(model.parameters()))
        assert isinstance(moment, DTensor) and moment.placements == weight.placements
        assert state["blocks.0.up.weight.step"].item() == 0


def _updates_on_a_grid(rank: int) -> torch.Tensor:
    """Two steps on dp 2 x tp 2 with parameters that are DTensors on both axes."""
    mesh = toy_mesh(tp_size=2 if torch.distributed.get_world_size() == 4 else 1)
    model, optimizer = toy(mesh, on_tp=True)
    for step in range(2):
        train_step(model, optimizer, toy_batches(step, mesh), mesh, StepState(0), step=step, lr=1e-2, clip_norm=0.0)
    return whole(model.blocks[1].up.weight)


def test_fused_update_on_both_axes() -> None:
    grid = launch(_updates_on_a_grid, 4)
    single = launch(_updates_on_a_grid, 1)[0]
    assert all(torch.equal(grid[0], other) for other in grid[1:])
    assert torch.allclose(single, grid[0], atol=1e-6)
