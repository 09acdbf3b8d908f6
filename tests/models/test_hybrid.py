import copy
import math

import pytest
import torch

from megatron_fp4.parallel.data_parallel import apply_data_parallel
from megatron_fp4.parallel.layers import QuantizedLinear
from models.hybrid import build_model
from models.pattern import check_pattern
from tests.models.builders import build, local, small_config, tokens_and_targets


def test_loss_begins_near_the_logarithm_of_the_vocabulary(mesh):
    config = small_config()
    loss = build(config, mesh)(*tokens_and_targets(config))
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert abs(loss.item() - math.log(config.vocab_size)) < 0.1


def test_loss_is_the_mean_negative_log_likelihood_of_the_logits(mesh):
    config = small_config()
    model = build(config, mesh)
    tokens, targets = tokens_and_targets(config)
    logits = model(tokens)
    assert logits.shape == (*tokens.shape, config.vocab_size)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected)


def test_the_model_is_causal(mesh):
    config = small_config(pattern="M*-")
    model = build(config, mesh)
    tokens, _ = tokens_and_targets(config, batch=1)
    logits = model(tokens)
    tokens = tokens.clone()
    tokens[0, 9] = (tokens[0, 9] + 1) % config.vocab_size
    changed = ((model(tokens) - logits).abs() > 1e-7).any(-1)[0]
    assert not changed[:9].any() and changed[9:].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_gets_an_fp32_gradient(mesh, dtype):
    config = small_config()
    model = build(config, mesh, dtype)
    model(*tokens_and_targets(config)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        assert local(parameter.grad).isfinite().all() and local(parameter.grad).abs().sum() > 0, name


def test_two_linears_a_block_in_order(mesh):
    model = build(small_config(pattern="M-*"), mesh)
    assert [name for name, _ in model.linears()] == [
        "blocks.0.mixer.in_proj",
        "blocks.0.mixer.out_proj",
        "blocks.1.mixer.up_proj",
        "blocks.1.mixer.down_proj",
        "blocks.2.mixer.qkv_proj",
        "blocks.2.mixer.out_proj",
    ]
    assert all(isinstance(module, QuantizedLinear) for _, module in model.linears())


def test_fp32_units_hold_what_must_not_be_rounded(mesh):
    model = build(small_config(), mesh)
    units = model.fp32_units()
    assert len(units) == 2
    assert {name for unit in units for name, _ in unit.named_parameters()} == {"A_log", "D", "dt_bias"}


def plain_and_sharded(mesh, reshard):
    """The same model twice, bare and under FSDP2, with weights that a BF16 copy does not change (but FP32 A)."""
    config = small_config()
    plain = build(config, mesh, torch.bfloat16)
    ssm = {id(p) for unit in plain.fp32_units() for p in unit.parameters()}
    for parameter in plain.parameters():
        if id(parameter) not in ssm:
            local(parameter.data).copy_(local(parameter.data).bfloat16())
    sharded = build_model(config, mesh, torch.bfloat16)
    sharded.load_state_dict(copy.deepcopy(plain.state_dict()))
    apply_data_parallel(
        sharded,
        mesh,
        units=list(sharded.blocks),
        fp32_units=sharded.fp32_units(),
        compute_dtype=torch.bfloat16,
        reshard=reshard,
    )
    losses = [model(*tokens_and_targets(config)) for model in (plain, sharded)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    return plain, sharded


@pytest.mark.parametrize("reshard", [False, True])
def test_gradients_under_fsdp_in_bf16_are_those_of_fp32_masters(mesh, reshard):
    """FSDP2 hands out BF16 copies; gradients must not pass through BF16 on the way back, and A must not be rounded."""
    plain, sharded = plain_and_sharded(mesh, reshard)
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert b.grad.dtype == torch.float32
        assert name == "embedding.weight" or torch.equal(local(a.grad), local(b.grad)), name


def test_gradient_of_the_embedding_under_fsdp_is_that_of_fp32_masters(mesh):
    plain, sharded = plain_and_sharded(mesh, reshard=False)
    assert torch.equal(local(plain.embedding.weight.grad), local(sharded.embedding.weight.grad))


def test_unknown_letters_are_named_with_their_position(mesh):
    with pytest.raises(ValueError, match="'x' at position 3"):
        build_model(small_config(pattern="M-*x"), mesh, torch.float32)
    with pytest.raises(ValueError, match="empty"):
        check_pattern("")
