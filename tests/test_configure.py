"""`pretrain.configure` makes the precision plans, so impossible ones are refused before ranks wait for each other."""

import errno
import os
from pathlib import Path

import pytest
import torch

import pretrain
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.runtime.errors import ExitCode, exit_code_of
from megatron_fp4.training.build import configuration_errors
from models.hybrid import build_model
from models.pattern import linear_shapes
from tests.composing import CONFIGS, composed


@pytest.mark.parametrize("model", [path.stem for path in sorted((CONFIGS / "model").glob("*.yaml"))])
def test_planned_shapes_are_those_of_the_models_linears(model: str, mesh: ParallelMesh) -> None:
    config = composed(f"model={model}").model
    with torch.device("meta"):
        linears = build_model(config, mesh, torch.bfloat16).linears()
    shapes = [(name, linear.in_features, linear.out_features) for name, linear in linears]
    assert [(cost.name, cost.in_features, cost.out_features) for cost in linear_shapes(config)] == shapes


def test_exceptions_that_cannot_switch_are_refused(tmp_path: Path) -> None:
    (tmp_path / "precision").mkdir()
    shard = "defaults: [nvfp4, _self_]\nname: shard\namax: shard\nbf16_blocks: {first: 0, last: 0}\n"
    (tmp_path / "precision" / "shard.yaml").write_text(shard)
    backward = [f"--config-dir={tmp_path}", "precision=mxfp8", "precision.switch.when=0.5"]
    backward += ["precision.switch.target=shard", "precision.switch.scope=backward"]
    pretrain.configure(backward)
    exception = "precision.exceptions=[{names: ['*.out_proj'], precision: nvfp4}]"
    with pytest.raises(ConfigError, match=r"keeps precision.amax=global and"):
        pretrain.configure([*backward, exception])


def test_a_branch_with_its_own_checkpoints_does_not_need_its_parent(tmp_path: Path) -> None:
    branch = [f"run.dir={tmp_path}", f"checkpoint.resume={tmp_path}/gone/checkpoints/step_00000002"]
    with pytest.raises(ConfigError, match="is not a folder; give a checkpoint"):
        pretrain.configure(branch)
    (tmp_path / "checkpoints" / "step_00000004").mkdir(parents=True)
    assert pretrain.configure(branch).checkpoint.resume == branch[1].partition("=")[2]


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOENT, ExitCode.REFUSED), (errno.EROFS, ExitCode.REFUSED), (errno.ENOSPC, ExitCode.CRASHED)],
)
def test_only_errors_that_a_restart_would_meet_again_are_refusals(number: int, code: ExitCode) -> None:
    error = OSError(number, os.strerror(number), "corpus.bin")
    with pytest.raises(Exception, match=r"corpus\.bin") as caught, configuration_errors("data: "):
        raise error
    assert exit_code_of(caught.value) is code and (caught.value is error) == (code is ExitCode.CRASHED)
