"""--check opens what a run would open, reports what it would need, and changes nothing."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pretrain
from data import provider as data_provider
from data.tokenizer import train_tokenizer
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.planning import needs
from models import provider as models
from pretrain import CONFIGS, configure
from tests.composing import saved_of
from tests.composing import validate as check_configuration
from tests.distributed.one_rank import flip_a_bit
from tests.test_resume import FEW, checkpoint, cut, data

__all__ = ["data"]
STEPS, BEGIN = 4, "checkpoint.initialize_from=RUN"
Check = Callable[..., list[str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: list[str]) -> Path:
    """The folder of a finished run of 4 steps, with checkpoints of steps 2 and 4. Not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert pretrain.main([*FEW, *data, f"run.dir={folder}", f"train.steps={STEPS}", "validation.interval=0"]) == 0
    return folder


@pytest.fixture(scope="module")
def saved(data: list[str]) -> dict[str, Any]:
    """The saved configuration of the run, composed only once."""
    return saved_of(configure([*FEW, *data, f"train.steps={STEPS}"]))


@pytest.fixture
def check(saved: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """Does what --check does with run.dir and overrides; it must not change the folder. Returns the printed lines."""
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def check(run_dir: Path, *overrides: str) -> list[str]:
        before = sorted(run_dir.rglob("*"))
        capsys.readouterr()
        config = config_from_saved(saved, [f"run.dir={run_dir}", *overrides], CONFIGS, trusted=True)
        try:
            check_configuration(config, 1, "cpu")
            needs.print_check(config, models, data_provider)
        finally:
            assert sorted(run_dir.rglob("*")) == before
        return capsys.readouterr().out.splitlines()

    return check


def refused(check: Check, run_dir: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(run_dir, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_command_prints_ok_or_a_refusal(data: list[str], tmp_path: Path, capsys, no_plan: None) -> None:
    command = ["--check", *FEW, *data, f"run.dir={tmp_path}/run"]
    assert pretrain.main(command) == 0
    (*_, last) = capsys.readouterr().out.splitlines()
    assert last == "ok: 1 rank, 4,096 tokens, 1.0 GiB a rank (fits h100: 79), about 2.0 hours on GPUs"
    assert pretrain.main([*command, "data.sources.code=/nowhere/code"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("pretrain.py: data.sources.code: /nowhere/code.idx does not") and not printed.out
    assert printed.err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_the_check_of_a_new_run(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    *lines, last = check(tmp_path / "run", "train.steps=10k")
    assert last.startswith("ok: 2 ranks, 5,120,000 tokens, 0.1 GiB a rank (fits h100: 79), about ")
    assert last.endswith(" on GPUs")
    text = "\n".join(lines)
    epochs = re.search(r"epochs by the end: code ([\d.]+), prose ([\d.]+)$", text, re.MULTILINE)
    assert epochs is not None and float(epochs[1]) == pytest.approx(5_120_000 * 0.62 / (300 * 200), rel=0.02)
    assert "warning: the run repeats data.sources.code, prose more than 4 times" in text
    assert "train      code                300 documents" in text and "checkpoint: none yet; begins at step 0" in text
    whole = "8 of 8 linears in bf16 (100.0% of their weights)"
    assert f"precision switches before step 7,501 (before_decay), to bf16: {whole}" in lines
    monkeypatch.setenv("RANK", "1")  # under torchrun only the first rank prints
    assert check(tmp_path / "run") == [] and not (tmp_path / "run").exists()


@pytest.fixture
def no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    dry = SimpleNamespace(memory=SimpleNamespace(peak=2**30))
    step = needs.PlannedPhase("all", 1, 1, 1), needs.StepTime(7200.0, 0.0, 0.0, 0.0)
    monkeypatch.setattr(needs, "plan_run", lambda *_: (dry, [step]))


@pytest.mark.usefixtures("no_plan")
def test_the_check_of_a_run_that_resumes(check: Check, trained: Path) -> None:
    needs_and_left = "1.0 GiB a rank (fits h100: 79), nothing left to do: the run is finished"
    assert check(trained)[-1] == f"ok: 1 rank, 2,048 tokens, {needs_and_left}"
    with pytest.raises(ConfigError, match=r"finished its 4 steps with other settings \(optimizer.lr 0.002 -> 0.001\)"):
        check(trained, "optimizer.lr=0.001")
    lines = check(trained, "train.steps=12")
    assert f"checkpoint: {checkpoint(trained, 4)}, step 4 of 12" in lines
    assert any(line.startswith("data: phases after sample 32: were none; are") for line in lines)
    left = "about 2.0 hours on GPUs for the 8 steps that are left"
    assert lines[-1] == f"ok: 1 rank, 6,144 tokens, 1.0 GiB a rank (fits h100: 79), {left}"


@pytest.mark.slow
@pytest.mark.usefixtures("no_plan")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.rope=true"], "belongs to another run: model.rope: False in the checkpoint, True now. Set these back"),
        (["train.steps=2"], "has 32 samples in 4 steps, but the run ends after 2 steps; resume with train.steps=4"),
        (["data.phases=[{name: all, blend: {code: 1}}]"], "phase 'broad' has served samples"),
        (["checkpoint.resume=never"], "already has checkpoints up to step 4, which the run would overwrite; choose"),
        (["run.dir=RUN/metrics.jsonl"], "metrics.jsonl is a file, not a folder; choose another run.dir"),
        (["run.dir=RUN/dangling"], "checkpoints is a link to /no/such, which is missing"),
        (["run.dir=RUN/file"], "checkpoints is a file, not a folder; choose another run.dir"),
        ([f"run.dir=RUN/{'x' * 300}"], "File name too long"),
        (["run.dir=/proc/nothing"], "run.dir=/proc/nothing cannot be written to"),
        (["data.max_epochs=0.0001"], "the run would go through"),
        ([BEGIN], "has checkpoints of a run that began from new weights; choose another run"),
        ([BEGIN, "run.dir=RUN/new", "model.ffn_dim=256"], "is of another model or tokenizer"),
        ([BEGIN, "run.dir=RUN/new", "data.tokenizer=RUN/t.json"], "data.tokenizer: None in"),
    ],
)
def test_the_check_refuses_what_a_start_refuses(
    overrides: list[str], message: str, data: list[str], trained: Path, tmp_path: Path, capsys
) -> None:
    run_dir = Path(shutil.copytree(trained, tmp_path / "run"))
    train_tokenizer(["some text"] * 3, 300).save(run_dir / "t.json")
    for name in ("dangling", "file"):
        (run_dir / name).mkdir()
    (run_dir / "dangling" / "checkpoints").symlink_to("/no/such")
    (run_dir / "file" / "checkpoints").touch()
    given = [f"run.dir={run_dir}", *(override.replace("RUN", str(run_dir)) for override in overrides)]
    lines = []
    for extra in ("--check", "run.seed=1234"):
        assert pretrain.main([*FEW, *data, f"train.steps={STEPS}", "validation.interval=0", extra, *given]) == 2
        lines.append(capsys.readouterr().err.splitlines()[-1])
    assert message in lines[0] and lines[0] == lines[1]


@pytest.mark.usefixtures("no_plan")
def test_the_check_reports_damaged_and_lost_checkpoints(check: Check, trained: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(trained, tmp_path / "run"))
    cut(checkpoint(run_dir, 4) / ".metadata")
    for damage in (flip_a_bit, cut):
        damage(checkpoint(run_dir, 4) / ".metadata")
        lines = check(run_dir)
        assert f"checkpoint: {checkpoint(run_dir, 2)}, step 2 of 4" in lines
        assert any("DAMAGED, would be moved aside: step_00000004: .metadata has" in line for line in lines)
    flip_a_bit(checkpoint(run_dir, 2) / "trainer.json")
    assert "none is intact" in refused(check, run_dir)
    shutil.rmtree(run_dir / "checkpoints")
    assert "is of an earlier run" in refused(check, run_dir)


@pytest.mark.usefixtures("no_plan")
def test_the_check_names_the_checkpoint_that_a_run_begins_from(check: Check, trained: Path, tmp_path: Path) -> None:
    start = checkpoint(trained, 2)
    assert f"checkpoint: {start}, step 2 of 4" in check(tmp_path / "branch", f"checkpoint.resume={start}")
    lines = check(tmp_path / "new", f"checkpoint.initialize_from={trained}")
    assert f"checkpoint: none yet; begins at step 0 with the weights of {trained}" in lines
