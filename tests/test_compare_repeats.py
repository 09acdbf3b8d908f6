"""scripts/compare_repeats.py: equal runs are equal, and every kind of difference is seen."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from scripts import compare_repeats
from scripts.compare_repeats import FailedError, Repeat, Start
from tests.programs import Program
from tests.test_pretrain import SMALL

RUN = Repeat("run 1", {1: (2.5, 1.0), 2: (2.25, None)}, {"model.a": "x", "optimizer.a": "y"}, [])


def test_defaults_give_way() -> None:
    overrides = compare_repeats.with_defaults(["model=tiny", "+train.steps=3"])
    assert overrides[-2:] == ["model=tiny", "+train.steps=3"]
    assert "checkpoint.interval=4" in overrides and "model=hybrid_60m" not in overrides
    assert not any(override.startswith("train.steps=") for override in overrides)


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ([], True),
        (["data.num_workers=0"], True),
        (["data=indexed"], False),
        (["experiment=nemotron_h_8b", "+data.sources={web: x}"], False),
        (["data.cache_dir=x"], False),
    ],
)
def test_starts_share_the_built_in_corpus(given: list[str], added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert ("data.cache_dir=/somewhere/megatron_fp4" in compare_repeats.with_defaults(given)) == added


def test_equal_runs_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_repeats.differences(RUN, replace(RUN, name="run 2")) == []
    assert compare_repeats.report([RUN, replace(RUN, name="run 2")]) == 0
    assert "all 2 runs are equal: 2 steps, 2 tensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"steps": {1: (2.5, 1.0), 2: (2.25000001, None)}}, "loss differs in 1 of 2 steps, first in step 2"),
        ({"steps": {1: (2.5, 1.0000001), 2: (2.25, None)}}, "grad_norm differs in 1 of 2 steps, first in step 1"),
        ({"steps": {1: (2.5, 1.0), 2: (2.25, 0.0)}}, "0.0 instead of None"),
        ({"steps": {1: (2.5, 1.0)}}, "1 steps instead of 2"),
        ({"tensors": {"model.a": "z", "optimizer.a": "y"}}, "1 of 1 tensors of the model differ, such as model.a"),
        ({"tensors": {"model.a": "x"}}, "1 of 1 tensors of the optimizer differ, such as optimizer.a"),
    ],
)
def test_a_difference_is_seen(other: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = compare_repeats.differences(RUN, replace(RUN, **other))
    assert text in line
    assert compare_repeats.report([RUN, RUN, replace(RUN, **other)]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_digests_see_a_bit_a_dtype_and_a_shape(tmp_path: Path) -> None:
    ones = torch.ones(4, 2)
    variants = [ones, torch.nextafter(ones, 2 * ones), ones.bfloat16(), ones.T, ones.view(torch.int32), torch.ones(0)]
    digests = []
    for number, tensor in enumerate(variants):
        state = {"model": {"w": tensor.contiguous()}, "optimizer": {"step": torch.tensor(3.0)}}
        save(state, storage_writer=FileSystemWriter(tmp_path / str(number)), no_dist=True)
        digests.append(compare_repeats.tensor_digests(tmp_path / str(number)))
    assert all(digest.keys() == {"model.w", "optimizer.step"} for digest in digests)
    assert len({digest["model.w"] for digest in digests}) == len(variants)
    assert len({digest["optimizer.step"] for digest in digests}) == 1


def tuned(kernel: str, key: str, choice: str) -> str:
    return (
        f"Triton autotuning for function {kernel},\nwith key as {key},\n"
        f"finished after 0.25s,\nbest config selected: {choice};\n"
    )


def test_differing_choices_are_listed() -> None:
    common = tuned("_fwd", "(128, 'torch.float32')", "BLOCK_SIZE_M: 64, num_warps: 4")
    outputs = ["noise\n" + common + tuned("_bwd", "(128,)", f"BLOCK_SIZE_M: {size}") for size in (32, 64)]
    repeats = [
        replace(RUN, name=name, starts=[Start(1.0, [output])]) for name, output in zip("ab", outputs, strict=True)
    ]
    text = compare_repeats.tuning_report(repeats)
    assert "a, start 1, rank 0: 2 in 0.5 s" in text and "different choices for 1 of 2 kernels and keys" in text
    assert "_bwd (128,)" in text and "_fwd (128" not in text
    assert "different choices for 0 of 2" in compare_repeats.tuning_report([repeats[0], repeats[0]])


@pytest.mark.parametrize("arguments", [["run.dir=x"], ["--repeats", "1", "--kill-after", "0"]])
def test_a_wrong_command_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compare_repeats.main(arguments)
    assert ended.value.code == 2


TINY = [
    *(setting for setting in SMALL if not setting.startswith(("train.steps", "checkpoint.", "validation."))),
    "train.steps=8",
    "checkpoint.interval=1",
    "model=tiny",
]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started comes from a fork server; the tests with stubs start interpreters."""

    def started(command: list[str], *, env: dict[str, str], stdout: Any, start_new_session: bool, **_: Any) -> Program:
        return Program(command[1:], env, output=Path(stdout.name), own_session=start_new_session)

    monkeypatch.setattr(compare_repeats.subprocess, "Popen", started)


@pytest.mark.slow
def test_runs_on_two_ranks_one_of_them_killed(
    forked: None, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = [*TINY, f"data.cache_dir={corpus}"]
    options = ["--nproc", "2", "--repeats", "1", "--kill-after", "2", "--output", str(tmp_path), "--print-autotuning"]
    code = compare_repeats.main([*overrides, *options])
    output, errors = capfd.readouterr()
    assert code == 0, output + errors
    assert "killed and resumed, start 2, rank 1: 0 in 0.0 s" in output and "all 2 runs are equal: 8 steps" in output
    assert "resumed after step" in (tmp_path / "start_3_rank_0.log").read_text()
    assert (tmp_path / "caches").parent == tmp_path and not (tmp_path / "run_2").exists()


@pytest.mark.slow
def test_a_failed_run_ends_the_comparison(forked: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert compare_repeats.main(["model=no_such_model", "--output", str(tmp_path)]) == 1
    assert "no_such_model" in capfd.readouterr().err


def test_a_run_that_cannot_be_killed_in_time_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, "pass")
    with pytest.raises(FailedError, match="was finished before it could be killed"):
        compare_repeats.Program([], 1, tmp_path, 30.0).killed("killed", 2)


KILLED = """
import json, os, sys, time
from pathlib import Path

run_dir = Path(sys.argv[-1].removeprefix("run.dir="))
run_dir.mkdir(exist_ok=True)
names = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
with (run_dir / "environments").open("a") as file:
    print(*(os.environ[name] for name in names), file=file)
resumed = (run_dir / "metrics.jsonl").exists()
if "checkpointed" in sys.argv:
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    (run_dir / "checkpoints" / "latest").touch()
if "killed" in run_dir.name and not resumed:
    (run_dir / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 2}) + chr(10))
    time.sleep(60)
"""


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    program = folder / "pretrain.py"
    program.write_text(text)
    monkeypatch.setattr(compare_repeats, "PRETRAIN", program)


@pytest.mark.parametrize("own", [False, True])
def test_a_resumed_start_finds_no_choices_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """All other starts find those of the first; compiled kernels are every start's own if wanted, and only then."""
    stub(tmp_path, monkeypatch, KILLED)
    read = lambda self, name, run_dir, starts: replace(RUN, name=name, starts=starts)  # noqa: E731
    monkeypatch.setattr(compare_repeats.Program, "_read", read)
    program = compare_repeats.Program(["checkpointed"], 1, tmp_path, 30.0)
    program.own_caches = own
    program.straight("run")
    assert len(program.killed("killed", 2).starts) == 2
    found = [line.split() for name in ("run", "killed") for line in (tmp_path / name / "environments").open()]
    machines, *compiled = zip(*found, strict=True)
    assert machines == tuple(str(tmp_path / name) for name in ("machine", "machine", "another_machine"))
    assert [len(set(folders)) for folders in compiled] == ([3, 3] if own else [1, 1])


def test_a_run_killed_before_its_first_checkpoint_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, KILLED)
    with pytest.raises(FailedError, match="killed before its first checkpoint; raise --kill-after"):
        compare_repeats.Program([], 1, tmp_path, 5.0).killed("killed", 2)


def test_a_run_that_hangs_is_ended_with_all_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, "import time; print('here', flush=True); time.sleep(60)")
    started: list[Any] = []
    popen = compare_repeats.subprocess.Popen

    def recorded(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(compare_repeats.subprocess, "Popen", recorded)
    with pytest.raises(FailedError, match="failed or took too long"):
        compare_repeats.Program([], 2, tmp_path, 0.5).straight("hanging")
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
