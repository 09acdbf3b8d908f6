"""Whole models: gradients under FSDP, numbers of parameters, FLOPs, initial values."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.data_parallel import apply_data_parallel, gathered_parameters
from models.hybrid import build_model
from models.pattern import forward_flops_per_token, parameter_count, training_flops_per_token
from tests.composing import composed
from tests.models.builders import build, local, small_config, tokens_and_targets
from tests.training.harness import shard_by_fsdp


@pytest.mark.parametrize(
    ("apply", "reshard"), [*itertools.product((apply_data_parallel, shard_by_fsdp), (False, True))]
)
def test_gradients_of_bf16_copies_are_those_of_fp32_masters(mesh, apply, reshard):
    """The forward pass uses BF16 copies (FSDP2 gathers them). Gradients must not be rounded to BF16, nor A_log, D and
    dt_bias, which stay in FP32. All other weights are exact in BF16.
    """
    config = small_config()
    plain = build(config, mesh, torch.bfloat16)
    ssm = {id(p) for unit in plain.fp32_units() for p in unit.parameters()}
    for parameter in plain.parameters():
        if id(parameter) not in ssm:
            local(parameter.data).copy_(local(parameter.data).bfloat16())
    sharded = build_model(config, mesh, torch.bfloat16)
    sharded.load_state_dict(copy.deepcopy(plain.state_dict()))
    blocks, own, dtype = list(sharded.blocks), sharded.fp32_units(), torch.bfloat16
    apply(sharded, mesh, units=blocks, fp32_units=own, compute_dtype=dtype, reshard=reshard)
    with gathered_parameters(sharded):
        losses = [model(*tokens_and_targets(config)) for model in (plain, sharded)]
        for loss in losses:
            loss.backward()
    assert losses[0].item() == losses[1].item()
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert a.grad.dtype == b.grad.dtype == torch.float32 and local(a.grad).abs().sum() > 0
        assert torch.equal(local(a.grad), local(b.grad)), name


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("transformer_1_2b", 1_291_929_600),
        ("nemotron_h_8b", 8_084_075_520),
        ("nemotron_h_12b", 12_314_591_360),
        ("nemotron_h_8b_base_8k", 8_100_852_736),
        ("nemotron_nano_12b_v2", 12_310_001_152),
        ("hybrid_60m", 61_803_024),
        ("transformer_60m", 60_046_848),
    ],
)
def test_models_have_the_parameter_counts_of_the_paper_and_of_published_checkpoints(mesh, name, published):
    config = composed(f"model={name}").model
    with torch.device("meta"):
        model = build_model(config, mesh, torch.bfloat16)
    assert config.vocab_size == (131072 if published > 1e9 else 16384)
    assert sum(parameter.numel() for parameter in model.parameters()) == published
    assert parameter_count(config).total == published


def test_flops_of_each_block_are_those_counted_by_hand():
    config = ModelConfig(
        pattern="M-*", vocab_size=7, hidden_dim=10, ffn_dim=30, num_query_heads=4, num_kv_heads=2, head_dim=3,
        mamba_num_heads=6, mamba_head_dim=5, mamba_num_groups=2, mamba_state_dim=4,
    )  # fmt: skip
    mamba = 2 * 10 * (2 * 30 + 2 * 2 * 4 + 6) + 2 * 30 * 10
    attention = 2 * 10 * (2 * 12 + 2 * 6)
    mixing, head = 2 * 100 * 12 + 7 * 30 * 4, 2 * 10 * 7
    forward = mamba + 4 * 10 * 30 + attention + mixing + head
    assert forward_flops_per_token(config, 100) == forward
    assert training_flops_per_token(config, 100) == 3 * forward


CONFIG = small_config(hidden_dim=128, ffn_dim=256, vocab_size=512, mamba_num_heads=64, mamba_num_groups=2)


@pytest.fixture(scope="module")
def values(mesh):
    return {name: local(p).detach() for name, p in build(CONFIG, mesh).named_parameters()}


def test_initial_values(values):
    for name in ("embedding", "head", "blocks.0.mixer.in_proj", "blocks.0.mixer.out_proj", "blocks.1.mixer.down_proj"):
        std, name = CONFIG.num_blocks**-0.5 if "out_" in name or "down_" in name else 1.0, f"{name}.weight"
        standard = values[name] / (std * CONFIG.init_std)
        for power, moment, spread in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):
            assert abs(standard.pow(power).mean() - moment) < 4 * math.sqrt(spread / standard.numel()), (name, power)
    decay = values["blocks.0.mixer.ssm.A_log"].exp()
    assert 1 <= decay.min() < 3 and 14 < decay.max() <= 16.001
    dt = F.softplus(values["blocks.0.mixer.ssm.dt_bias"])
    assert 0.00099 < dt.min() < 0.003 and 0.04 < dt.max() < 0.101
    assert abs(dt.log().mean() - math.log(0.01)) < 0.6
    assert (values["blocks.0.mixer.ssm.D"] == 1).all()
    for kind in ("weight", "bias"):
        conv = values[f"blocks.0.mixer.conv.{kind}"]
        assert -0.5 <= conv.min() < -0.45 and 0.45 < conv.max() <= 0.5


def test_initial_values_depend_only_on_seed_and_name(mesh, values, monkeypatch):
    monkeypatch.setattr("models.initialization._PIECE_ON_CPU", 1000)
    again = {name: local(p) for name, p in build(CONFIG, mesh).named_parameters()}
    assert all(torch.equal(again[name], value) for name, value in values.items())
    other = {name: local(p) for name, p in build(CONFIG, mesh, seed=1).named_parameters()}
    assert not torch.equal(other["head.weight"], values["head.weight"])
    assert not torch.equal(values["blocks.0.mixer.in_proj.weight"], values["blocks.4.mixer.in_proj.weight"])
