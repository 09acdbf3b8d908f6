"""A kind of block that no shipped model has, made of one row of `MIXERS`: its auxiliary loss, buffer, three-dimensional
weight, and shapes that vary; in a run, on two ranks, and refused for export before the run."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exchange.checkpoint import load_model, open_checkpoint
from exchange.megatron_model import arguments_of
from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import local_parameter, new_parameter
from megatron_fp4.precision.plan import LinearShape
from models.execution import PLAIN, Execution
from models.hybrid import build_model
from models.initialization import Rule, initialize
from models.mixer import Mixer, input_projection, output_projection
from models.pattern import MIXERS
from models.positions import Documents
from pretrain import CONFIGS
from scripts import convert
from tests.models.builders import local, relative_error, small_config, tokens_and_targets
from tests.spiked_run import FAST, printed_by, small_corpus
from tests.test_pretrain import SMALL, records
from tests.training.harness import alone


class Outsider(Mixer):
    """Only every second token passes the linears."""

    name = "outsider"
    coefficient, shift = 0.5, 1.0

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__(config, mesh, execution)
        self.up = ColumnParallelLinear(config.hidden_dim, config.ffn_dim, mesh)
        self.down = RowParallelLinear(config.ffn_dim, config.hidden_dim, mesh)
        self.tables = new_parameter((4, 8, config.hidden_dim), mesh)
        self.register_buffer("bias", torch.empty(config.hidden_dim))

    def initial_values(self) -> dict[str, Rule]:
        return {"tables": lambda draws: draws.normal(0.3), "bias": lambda draws: self.shift}

    def forward(self, x_td: Tensor, sequence_length: int, documents: Documents | None = None) -> Any:
        tables = local_parameter(self.tables)
        y_td = self.down(self.up(x_td[::2]).relu()).repeat_interleave(2, 0)
        y_td = y_td + x_td * tables.sum((0, 1)).to(x_td) + self.bias.to(x_td)
        return y_td, self.coefficient * tables.square().sum()

    @classmethod
    def linears(cls, config: ModelConfig) -> Sequence[LinearShape]:
        down = output_projection("down", config, config.ffn_dim, "model.ffn_dim", "the outsider's projection")
        return [replace(shape, active=0.5) for shape in (input_projection("up", config, config.ffn_dim), down)]

    @classmethod
    def other_parameters(cls, config: ModelConfig) -> int:
        return 4 * 8 * config.hidden_dim


@pytest.fixture
def mesh() -> Iterator[ParallelMesh]:
    with alone() as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def outsider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "E", Outsider)


def test_an_auxiliary_loss_adds_its_gradient_and_leaves_the_printed_loss(mesh: ParallelMesh, monkeypatch: Any) -> None:
    config = small_config(pattern="EE-")
    tokens, targets = tokens_and_targets(config)
    for recompute in ("none", "block", "selective"):
        losses, gradients = [], []
        for coefficient in (0.0, 0.5):
            monkeypatch.setattr(Outsider, "coefficient", coefficient)
            model = build_model(config, mesh, torch.float32, Execution(recompute=recompute))
            initialize(model, config, seed=0)
            (loss := model(tokens, targets) / 4).backward()
            losses.append(loss.item())
            gradients.append({name: local(p.grad) for name, p in model.named_parameters()})
        assert losses[0] == losses[1]
        for name, parameter in model.named_parameters():
            expected = gradients[0][name]
            if name.endswith("tables"):
                expected = expected + local(parameter).detach() / 4
                assert relative_error(gradients[0][name], expected) > 0.1
            assert relative_error(gradients[1][name], expected) < 1e-6, name


def test_a_run_trains_resumes_and_refuses_what_it_cannot(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A resumed run has the buffer of the checkpoint, not a new one."""
    run = [*SMALL, *FAST, *small_corpus(tmp_path), "model.pattern=ME-", "train.steps=4", "checkpoint.interval=2"]
    assert "outsider blocks" in printed_by([*run, f"run.dir={tmp_path}/a"], capsys, 0)
    assert "ok: 1 rank" in printed_by([*run, f"run.dir={tmp_path}/d", "--check"], capsys, 0)
    monkeypatch.setattr(Outsider, "shift", 7.0)
    resume = f"checkpoint.resume={tmp_path}/a/checkpoints/step_00000002"
    printed_by([*run, f"run.dir={tmp_path}/b", resume], capsys, 0)
    ends = [records(tmp_path / name, "step")[-1]["loss"] for name in "ab"]
    assert ends[0] == ends[1]
    checkpoint = open_checkpoint(tmp_path / "b", CONFIGS)
    assert dict(load_model(checkpoint).named_buffers())["blocks.1.mixer.bias"].unique().tolist() == [1.0]

    refused = printed_by([*run, f"run.dir={tmp_path}/c", "checkpoint.export_interval=2"], capsys, 2)
    assert "checkpoint.export_interval=2: transformers has no architecture for this model: model.pattern=ME-" in refused
    assert "has outsider blocks; leave it out" in refused and not (tmp_path / "c").exists()
    assert convert.main(["export-hf", f"{tmp_path}/b", f"{tmp_path}/hf"]) == 2
    assert "model.pattern=ME- has outsider blocks" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"Megatron has no model like this: model.pattern=ME- has outsider blocks"):
        arguments_of(checkpoint.config.model, 32, bf16=True)
