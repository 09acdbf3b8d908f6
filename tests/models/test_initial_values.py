import math

import pytest
import torch
import torch.nn.functional as F

from models import initialization
from models.hybrid import build_model
from models.initialization import initialize
from tests.models.builders import build, local, small_config

CONFIG = small_config(hidden_dim=128, ffn_dim=256, vocab_size=512, mamba_num_heads=64, mamba_num_groups=2)


@pytest.fixture(scope="module")
def values(mesh):
    return {name: local(p).detach() for name, p in build(CONFIG, mesh).named_parameters()}


def test_normal_weights(values):
    scale = CONFIG.num_blocks**-0.5
    for name, std in {
        "embedding.weight": 1.0,
        "head.weight": 1.0,
        "blocks.0.mixer.in_proj.weight": 1.0,
        "blocks.1.mixer.up_proj.weight": 1.0,
        "blocks.0.mixer.out_proj.weight": scale,
        "blocks.1.mixer.down_proj.weight": scale,
        "blocks.2.mixer.out_proj.weight": scale,
    }.items():
        standard = values[name] / (std * CONFIG.init_std)
        n = standard.numel()
        assert abs(standard.mean()) < 4 / math.sqrt(n), name
        assert abs(standard.square().mean() - 1) < 4 * math.sqrt(2 / n), name
        assert abs(standard.pow(4).mean() - 3) < 4 * math.sqrt(96 / n), name


def test_weights_have_the_spectrum_of_independent_draws(values):
    """Correlated rows or columns would show as a singular value beyond sqrt(rows) + sqrt(columns)."""
    for name in ("embedding.weight", "blocks.1.mixer.up_proj.weight"):
        standard = values[name] / CONFIG.init_std
        edge = math.sqrt(standard.shape[0]) + math.sqrt(standard.shape[1])
        assert abs(torch.linalg.matrix_norm(standard, 2) / edge - 1) < 0.05, name


def test_mamba_values(values):
    decay = values["blocks.0.mixer.ssm.A_log"].exp()
    assert 1 <= decay.min() < 3 and 14 < decay.max() <= 16.001
    dt = F.softplus(values["blocks.0.mixer.ssm.dt_bias"])
    assert 0.00099 < dt.min() < 0.003 and 0.04 < dt.max() < 0.101
    assert abs(dt.log().mean() - math.log(0.01)) < 0.6
    assert (values["blocks.0.mixer.ssm.D"] == 1).all()
    for kind in ("weight", "bias"):
        conv = values[f"blocks.0.mixer.conv.{kind}"]
        assert -0.5 <= conv.min() < -0.45 and 0.45 < conv.max() <= 0.5


def test_norms_are_one(values):
    for name in ("final_norm.weight", "blocks.0.norm.weight", "blocks.0.mixer.norm.weight"):
        assert (values[name] == 1).all()


def test_depends_on_seed_and_name_only(mesh, values):
    again = {name: local(p) for name, p in build(CONFIG, mesh).named_parameters()}
    assert all(torch.equal(again[name], value) for name, value in values.items())
    other = {name: local(p) for name, p in build(CONFIG, mesh, seed=1).named_parameters()}
    assert not torch.equal(other["head.weight"], values["head.weight"])
    assert not torch.equal(values["blocks.0.mixer.in_proj.weight"], values["blocks.4.mixer.in_proj.weight"])


def test_filling_in_pieces_changes_nothing(mesh, values, monkeypatch):
    monkeypatch.setattr(initialization, "_PIECE", 1000)
    pieces = {name: local(p) for name, p in build(CONFIG, mesh).named_parameters()}
    assert all(torch.equal(pieces[name], value) for name, value in values.items())


def test_refuses_the_meta_device(mesh):
    with torch.device("meta"):
        model = build_model(CONFIG, mesh, torch.float32)
    with pytest.raises(ValueError, match=r"embedding.weight is on the meta device.*to_empty"):
        initialize(model, CONFIG, 0)
    model.to_empty(device="cpu")
    initialize(model, CONFIG, 0)
