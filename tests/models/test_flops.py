import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_fp4.config.schema import ModelConfig
from models.attention import Attention
from models.mamba2 import Mamba2
from models.pattern import forward_flops_per_token, linear_shapes, training_flops_per_token
from tests.models.builders import build, small_config, tokens_and_targets


def counted(config, mesh, length):
    """FLOPs per token of the forward pass, as torch counts them: {module name: {operator: FLOPs}}."""
    model = build(config, mesh, torch.bfloat16)
    tokens, _ = tokens_and_targets(config, length=length)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    return {
        name.removeprefix("HybridModel."): {operator: flops / tokens.numel() for operator, flops in counts.items()}
        for name, counts in counter.get_flop_counts().items()
    }


@pytest.mark.parametrize("pattern", ["M", "-", "*", "M-*-M-"])
def test_linears_and_head_are_what_torch_counts(mesh, pattern):
    config = small_config(pattern=pattern)
    counts = counted(config, mesh, 16)
    for linear in linear_shapes(config):
        assert counts[linear.name] == {torch.ops.aten.mm: linear.flops_per_token}, linear.name
    flops = forward_flops_per_token(config, 16)
    assert counts["head"] == {torch.ops.aten.mm: flops.head}
    assert flops.linears == sum(linear.flops_per_token for linear in linear_shapes(config))


def test_scores_are_the_causal_half_of_what_torch_counts(mesh):
    config = small_config(pattern="*-*")
    assert forward_flops_per_token(config, 24).mixing == counted(config, mesh, 24)["Global"][torch.ops.aten.bmm] / 2


def test_linear_shapes_name_the_models_linears(mesh):
    config = small_config()
    model = build(config, mesh)
    shapes = [(name, *linear.weight.shape) for name, linear in model.linears()]
    assert [(cost.name, cost.out_features, cost.in_features) for cost in linear_shapes(config)] == shapes
    assert all(
        config.pattern[cost.block] in "M-*" and f"blocks.{cost.block}." in cost.name for cost in linear_shapes(config)
    )


def test_the_formulas_of_each_block_by_hand():
    config = ModelConfig(
        pattern="M-*", vocab_size=7, hidden_dim=10, ffn_dim=30, num_query_heads=4, num_kv_heads=2, head_dim=3,
        mamba_num_heads=6, mamba_head_dim=5, mamba_num_groups=2, mamba_state_dim=4,
    )  # fmt: skip
    flops = forward_flops_per_token(config, 100)
    mamba = 2 * 10 * (2 * 30 + 2 * 2 * 4 + 6) + 2 * 30 * 10
    attention = 2 * 10 * (2 * 12 + 2 * 6)
    assert flops.linears == mamba + 4 * 10 * 30 + attention
    assert Attention.flops_per_token(config, 100) == 2 * 100 * 12
    assert Mamba2.flops_per_token(config, 100) == 7 * 30 * 4
    assert flops.mixing == 2 * 100 * 12 + 7 * 30 * 4
    assert flops.head == 2 * 10 * 7
    assert training_flops_per_token(config, 100) == 3 * flops.total
