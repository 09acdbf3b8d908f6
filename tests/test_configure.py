"""`pretrain.configure` makes the plans, so that what cannot be planned is refused before ranks wait for each other."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
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
from tests.composing import CONFIGS, composed, plans_of
from tests.programs import ROOT

FRESH = ["precision.fprop.rht=16", "precision.rht_signs=fresh", "precision.switch.target=mxfp4"]


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the configurations, to which a test may add some."""
    copy = shutil.copytree(CONFIGS, tmp_path / "configs")
    monkeypatch.setattr(pretrain, "CONFIGS", copy)
    return copy


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        pretrain.configure(list(overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("model", [path.stem for path in sorted((CONFIGS / "model").glob("*.yaml"))])
def test_shapes_are_those_of_the_models_linears(model: str, mesh: ParallelMesh) -> None:
    config = composed(f"model={model}").model
    with torch.device("meta"):
        linears = build_model(config, mesh, torch.bfloat16).linears()
    shapes = [(name, linear.in_features, linear.out_features) for name, linear in linears]
    assert [(cost.name, cost.in_features, cost.out_features) for cost in linear_shapes(config)] == shapes


def test_a_targets_list_is_named_by_the_target(configs: Path) -> None:
    odd = "defaults: [nvfp4, _self_]\nname: odd\nbf16_blocks: {names: ['*.outproj']}\n"
    (configs / "precision" / "odd.yaml").write_text(odd)
    assert refused("precision=mxfp8", "precision.switch.when=0.5", "precision.switch.target=odd").startswith(
        "precision.switch.target=odd: precision.bf16_blocks.names has '*.outproj'"
    )


def test_a_linear_must_be_able_to_switch() -> None:
    backward = [*FRESH, "precision.switch.scope=backward"]
    message = refused(*backward)
    assert "keeps precision.rht_signs=fresh and mxfp4 has fixed" in message
    for change in ("precision.switch.scope=both", "precision.fprop.rht=0", "precision.switch.target=bf16"):
        pretrain.configure([*backward, change])


def test_linears_of_exceptions_must_be_able_to_switch(configs: Path) -> None:
    shard = "defaults: [nvfp4, _self_]\nname: shard\namax: shard\nbf16_blocks: {first: 0, last: 0}\n"
    (configs / "precision" / "shard.yaml").write_text(shard)
    switch = ["precision=mxfp8", "precision.switch.when=0.5", "precision.switch.target=shard"]
    backward = [*switch, "precision.switch.scope=backward"]
    pretrain.configure(backward)
    exception = "precision.exceptions=[{names: ['*.out_proj'], precision: nvfp4}]"
    assert "keeps precision.amax=global and" in refused(*backward, exception)


def test_a_switch_that_is_off_has_no_plan() -> None:
    config = pretrain.configure([*FRESH, "precision.switch.scope=backward", "precision.switch.when=never"])
    plan, switched = plans_of(config)
    assert plan.num_quantized and switched is None
    plan, switched = plans_of(pretrain.configure([]))
    assert switched is not None and plan.num_quantized and not switched.num_quantized


def test_a_branch_does_not_need_its_parent_any_more(tmp_path: Path) -> None:
    branch = [f"run.dir={tmp_path}", f"checkpoint.resume={tmp_path}/gone/checkpoints/step_00000002"]
    assert "is not a folder; give a checkpoint" in refused(*branch)
    (tmp_path / "checkpoints" / "step_00000004").mkdir(parents=True)
    assert pretrain.configure(branch).checkpoint.resume == branch[1].partition("=")[2]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *((number, ExitCode.REFUSED) for number in (errno.ENOENT, errno.EACCES, errno.EROFS)),
        *((number, ExitCode.CRASHED) for number in (errno.EIO, errno.ESTALE, errno.ENOSPC, None)),
    ],
)
def test_what_a_disk_fails_at_is_no_refusal(number: int | None, code: ExitCode) -> None:
    """Only what the next start would meet as well is the user's to mend."""
    error = OSError("no number") if number is None else OSError(number, os.strerror(number), "corpus.bin")
    with pytest.raises(Exception, match=r"corpus\.bin|no number") as caught, configuration_errors("data: "):
        raise error
    assert exit_code_of(caught.value) is code
    assert (caught.value is error) == (code is ExitCode.CRASHED)


@pytest.mark.parametrize(("argument", "said"), [("train.steps=3", True), ("--check", False), ("run.dry=true", False)])
def test_a_run_says_something_before_it_imports_torch(tmp_path: Path, argument: str, said: bool) -> None:
    """On its first rank, unless what it prints is an answer."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')\n")
    for rank in ("0", "1"):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "RANK": rank}
        command = [sys.executable, str(ROOT / "pretrain.py"), argument]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.stderr == "torch is imported\n"
        assert done.stdout.startswith("megatron_fp4") == (said and rank == "0") and done.stdout.count("\n") <= 1
