"""The block of experts against its formula, transformers, and itself on other meshes and with recomputation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exchange.checkpoint import open_checkpoint
from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from models.execution import Execution
from models.hybrid import build_model
from models.initialization import initialize
from models.moe import Order
from models.pattern import active_parameters, linear_shapes, parameter_count
from pretrain import CONFIGS
from tests.composing import composed
from tests.models.builders import build, local, relative_error, small_config, tokens_and_targets
from tests.models.test_mixers import compare
from tests.spiked_run import FAST, small_corpus
from tests.test_pretrain import SMALL as SMALL_RUN
from tests.test_pretrain import records, run

SMALL = small_config(
    pattern="E", moe_num_experts=8, moe_top_k=3, moe_ffn_dim=48, moe_shared_ffn_dim=32, moe_scaling=2.5, init_std=0.3,
    moe_aux_loss=0.0,
)  # fmt: skip


def score_of(group: Tensor, config: ModelConfig) -> float:
    best = 2 if config.moe_group_score == "top_2" else config.moe_top_k // config.moe_top_groups
    return sum(sorted(group.tolist(), reverse=True)[:best])


def chosen_by(scores: Tensor, bias: Tensor, config: ModelConfig) -> list[int]:
    """The experts of a token, by a loop over candidates."""
    choice, per_group = scores + bias, config.moe_num_experts // config.moe_num_groups
    groups = sorted(
        range(config.moe_num_groups),
        key=lambda g: (-score_of(choice[g * per_group : (g + 1) * per_group], config), g),
    )[: config.moe_top_groups]
    candidates = [e for e in range(config.moe_num_experts) if e // per_group in groups]
    return sorted(candidates, key=lambda e: (-float(choice[e]), e))[: config.moe_top_k]


def activated(x: Tensor, config: ModelConfig) -> Tensor:
    """Gate and up are in turns of 16."""
    if config.moe_activation == "squared_relu":
        return x.relu().square()
    gate, up = x.unflatten(-1, (-1, 2, 16)).transpose(-3, -2).flatten(-2).unbind(-2)
    return gate * gate.sigmoid() * up


def moe_reference(x: Tensor, weights: dict[str, Tensor], config: ModelConfig, length: int) -> Tensor:
    """Token by token, expert by expert."""
    logits = x @ weights["router.weight"].t()
    scores = logits.sigmoid() if config.moe_score == "sigmoid" else logits.softmax(-1)
    latent = x @ weights["to_latent.weight"].t() if config.moe_latent_dim else x
    rows = []
    for token, score in zip(latent, scores, strict=True):
        experts = chosen_by(score.detach(), weights["bias"], config)
        total, row = sum(score[e] for e in experts), torch.zeros_like(token)
        for e in experts:
            inner = activated(weights["experts_up.weight"][e] @ token, config)
            row = row + config.moe_scaling * score[e] / total * (weights["experts_down.weight"][e] @ inner)
        rows.append(row)
    y = torch.stack(rows)
    if config.moe_latent_dim:
        y = y @ weights["from_latent.weight"].t()
    gated = config.moe_activation == "swiglu"
    shared = activated(x @ weights[f"shared_experts.{'gate_' * gated}up_proj.weight"].t(), config)
    return y + shared @ weights["shared_experts.down_proj.weight"].t()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_score": "softmax", "moe_weight": "before_down"},
        {"moe_latent_dim": 16, "moe_num_groups": 4, "moe_top_groups": 2},
        {"moe_num_experts": 16, "moe_top_k": 4, "moe_num_groups": 4, "moe_group_score": "top_share"},
        {"moe_num_experts": 16, "moe_top_k": 4, "moe_num_groups": 4},
        {"moe_activation": "swiglu"},
        {"moe_activation": "swiglu", "moe_weight": "before_down", "moe_latent_dim": 16},
    ],
)  # fmt: skip
def test_experts_equal_their_formula(mesh: ParallelMesh, changes: dict[str, Any]) -> None:
    config = replace(SMALL, **changes)
    mixer = build(config, mesh).blocks[0].mixer
    mixer.router.bias.copy_(torch.randn(config.moe_num_experts, generator=torch.Generator().manual_seed(4)) * 0.2)

    def reference(x: Tensor, weights: dict[str, Tensor], config: ModelConfig, length: int) -> Tensor:
        return moe_reference(x, {**weights, "bias": mixer.router.bias.double()}, config, length)

    compare(mixer, reference, config, 11, tolerance=1e-4)


def test_experts_begin_like_the_projections_of_other_blocks(mesh: ParallelMesh) -> None:
    mixer = build(replace(SMALL, pattern="E" * 4), mesh).blocks[0].mixer
    stds = [local(linear.weight.detach()).std().item() for linear in (mixer.experts_up, mixer.experts_down)]
    assert stds == pytest.approx([0.3, 0.3 / 4**0.5], rel=0.05)


def test_of_equal_scores_the_first_expert_is_chosen_and_the_bias_only_chooses(mesh: ParallelMesh) -> None:
    mixer = build(SMALL, mesh).blocks[0].mixer
    local(mixer.router.weight.data).zero_()
    mixer.router.bias.copy_(torch.tensor([0.0, 0, 1, 0, 0, 0, 0, 0]))
    expert_tk, counts_e, weight_tk, loss = mixer.router(torch.randn(6, 32), 6)
    assert expert_tk.tolist() == [[0, 1, 2]] * 6 and loss is None
    assert torch.allclose(weight_tk, torch.full((6, 3), 2.5 / 3))
    assert counts_e.tolist() == [6, 6, 6, 0, 0, 0, 0, 0]  # all tokens to three experts, none to the others
    assert Order.of(expert_tk).token_n.tolist() == [*range(6)] * 3
    mixer(torch.randn(6, 32), 6).sum().backward()
    gradient = local(mixer.experts_up.weight.grad)
    assert gradient.isfinite().all() and not gradient[3:].any() and gradient[:3].flatten(1).any(1).all()


def test_the_bias_follows_the_counts_and_keeps_its_mean(mesh: ParallelMesh) -> None:
    """At a bias of 64, as models without recentring reach it, FP32 ties scores; here it returns to mean 0 at once."""
    router = build(SMALL, mesh).blocks[0].mixer.router
    load = torch.tensor([9, 3, 4, 0, 4, 4, 4, 4])  # the mean is 4
    router.bias.fill_(64.0)
    router.balance(load)
    moved = torch.tensor([-1.0, 1, 0, 1, 0, 0, 0, 0])
    assert torch.allclose(router.bias, 1e-3 * (moved - moved.mean()), atol=1e-9)


def test_auxiliary_losses_are_those_of_their_formulas(mesh: ParallelMesh) -> None:
    config = replace(SMALL, moe_aux_loss=0.5, moe_z_loss=0.25)
    router, x = build(config, mesh).blocks[0].mixer.router, torch.randn(14, 32)
    router.bias.copy_(torch.arange(8.0))  # has no effect on them
    logits = (x @ local(router.weight).t()).view(2, 7, 8)
    for sequence, loss in enumerate(router(x, 7).loss):
        scores = logits[sequence].sigmoid()
        counts = torch.zeros(8).index_add_(0, scores.topk(3).indices.flatten(), torch.ones(21))
        shares = (scores / scores.sum(-1, keepdim=True)).sum(0)
        balance, z = (counts * shares).sum() * 8 / (3 * 7**2), logits[sequence].logsumexp(-1).square().mean()
        assert loss.item() == pytest.approx((0.5 * balance + 0.25 * z).item(), rel=1e-5)


def test_gradients_do_not_depend_on_micro_batches(mesh: ParallelMesh) -> None:
    """Those of all other losses too, though not all targets count, and none of a sequence."""
    config = replace(SMALL, pattern="ME/*E/*E", moe_aux_loss=0.5, moe_z_loss=0.25, mtp_use_repeated_layer=True)
    model, (tokens, targets) = build(config, mesh), tokens_and_targets(config, batch=4)
    targets = targets.clone().index_fill_(0, torch.tensor(2), -1)
    targets[0, 3:] = -1
    found = []
    for size in (4, 2, 1):
        model.zero_grad()
        for part, part_targets in zip(tokens.split(size), targets.split(size), strict=True):
            count = int((part_targets >= 0).sum())
            (model(part, part_targets, num_targets=count) * count / (targets >= 0).sum()).backward()
        found.append({name: local(parameter.grad).clone() for name, parameter in model.named_parameters()})
    for gradients in found[1:]:
        assert all(relative_error(gradients[name], expected) < 1e-5 for name, expected in found[0].items())


@pytest.mark.parametrize("changes", [{}, {"moe_weight": "before_down"}, {"moe_activation": "swiglu"}])
def test_a_recomputed_block_neither_counts_twice_nor_routes_anew(mesh: ParallelMesh, changes: dict[str, Any]) -> None:
    """The bias changes between forward and backward: the recomputation would choose other experts."""
    config = replace(SMALL, pattern="ME/E", moe_aux_loss=0.1, **changes)
    tokens, targets = tokens_and_targets(config)
    found = {}
    for recompute in ("none", "block", "selective"):
        model = build_model(config, mesh, torch.float32, Execution(recompute=recompute))
        initialize(model, config, seed=0)
        router = model.blocks[1].mixer.router
        router.load = torch.zeros(8, dtype=torch.int64)
        loss = model(tokens, targets)
        router.bias.copy_(torch.arange(8.0))
        loss.backward()
        found[recompute] = (router.load.tolist(), [local(p.grad) for p in model.parameters()])
        assert sum(router.load) == tokens.numel() * 3
    for load, gradients in found.values():
        assert load == found["none"][0]
        assert all(relative_error(g, h) < 1e-5 for g, h in zip(gradients, found["none"][1], strict=True))


@pytest.mark.slow(seconds=12)
def test_a_resumed_run_has_the_bias_of_its_checkpoint(tmp_path: Path) -> None:
    """And its losses, those of multi-token prediction too; in NVFP4, with recomputation. The records have the load. Two
    ranks that divide the experts resume like one."""
    sizes = ["model.moe_num_experts=4", "model.moe_ffn_dim=48", "model.moe_shared_ffn_dim=32"]
    sizes += ["model.pattern=ME/*E/*E", "model.mtp_use_repeated_layer=true"]
    settings = [*SMALL_RUN, *FAST, *small_corpus(tmp_path), *sizes, "train.activation_checkpointing=block"]
    settings += ["train.steps=4", "checkpoint.interval=2", "logging.interval=2", "model.nvfp4_bf16_blocks.last=0"]
    settings += ["precision=nvfp4", "precision.switch.when=never", "precision.diagnostics.interval=2"]
    settings += ["train.global_batch_size=4"]
    run(1, [*settings, f"run.dir={tmp_path}/a"])
    resume = f"checkpoint.resume={tmp_path}/a/checkpoints/step_00000002"
    run(1, [*settings, f"run.dir={tmp_path}/b", resume])
    divided = ["parallel.expert=2", "run.replay_interval=1", "run.replicas_interval=1"]
    run(2, [*settings, *divided, f"run.dir={tmp_path}/c", resume])
    ends = [records(tmp_path / name, "step")[-1] for name in "abc"]
    assert (ends[0]["loss"], ends[0]["grad_norm"]) == (ends[1]["loss"], ends[1]["grad_norm"])
    further = [records(tmp_path / name, "mtp")[-1] for name in "ab"]
    assert further[0] == further[1] and all(6 < further[0]["depths"][depth] < 6.5 for depth in "12")
    assert (ends[2]["loss"], ends[2]["grad_norm"]) == pytest.approx((ends[0]["loss"], ends[0]["grad_norm"]), rel=1e-4)
    biases = [open_checkpoint(tmp_path / name, CONFIGS).tensor("blocks.1.mixer.router.bias") for name in "abc"]
    assert torch.equal(biases[0], biases[1]) and torch.equal(biases[0], biases[2])
    assert biases[0].abs().max() > 2e-3 and biases[0].mean().abs() < 1e-8
    blocks = [records(tmp_path / name, "experts")[-1]["blocks"]["blocks.1"] for name in "ac"]
    assert blocks[1] == pytest.approx(blocks[0], abs=1e-3)
    assert 0.5 < blocks[0]["entropy"] <= 1 and blocks[0]["zero_gradients"] < 1
    linears = [records(tmp_path / name, "diagnostics")[-1]["linears"] for name in "ac"]
    for name in ("experts_up", "experts_down"):  # each rank measures a micro-batch of its own
        one, two = (found[f"blocks.1.mixer.{name}"]["gemms"] for found in linears)
        assert two == pytest.approx(one, rel=0.1)
    loads = [record["blocks"]["blocks.1"]["max_load"] for record in records(tmp_path / "a", "experts")]
    assert len(loads) == 2 and all(1 <= load <= 2 for load in loads)  # 2 of 4 experts: at most twice the mean
    flips = [record["blocks"]["blocks.1"] for record in records(tmp_path / "a", "flips")]
    assert len(flips) == 2 and all(0 < share < 0.5 for share in flips)


def test_nemotron_3_nano_has_its_published_size() -> None:
    config = composed("model=nemotron_3_nano").model
    assert parameter_count(config).total == 31_577_937_344
    assert active_parameters(config) - parameter_count(config).embedding == pytest.approx(3.228e9, rel=1e-4)
    in_experts = sum(shape.flops_per_token for shape in linear_shapes(config) if shape.experts > 1)
    assert in_experts == 2 * 23 * 6 * 2 * 2688 * 1856
