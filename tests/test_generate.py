"""scripts/generate.py on the checkpoint of a small run, and the texts that the run itself recorded."""

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pretrain
from exchange.checkpoint import load_model, open_checkpoint
from exchange.tokenizer import tokenizer_of
from inference.generation import Request, Sampling, Settings, generate, lower_weights
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.parallel.mesh import leave_distributed
from pretrain import CONFIGS
from scripts.generate import load, main, parse
from tests.distributed.one_rank import flip_a_bit
from tests.exchange.models import text_data
from tests.inference.folders import checkpoint_of, tokenizer
from tests.programs import ROOT, as_child
from tests.test_pretrain import SMALL, records

pytestmark = pytest.mark.slow
PROMPT = "def naïve("


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    own = ["train.steps=4", "validation.interval=2", "validation.num_samples=2", "precision.switch.when=never"]
    texts = [f'validation.prompts=["{PROMPT}",""]', "validation.prompt_tokens=7", "optimizer.lr=0.02"]
    assert pretrain.main([*SMALL, *text_data(folder), *own, *texts, f"run.dir={folder / 'run'}"]) == 0
    return folder / "run"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    """Runs the command with arguments; returns (exit code, stdout, lines of stderr)."""

    def call(*arguments: object) -> tuple[int, str, list[str]]:
        capsys.readouterr()
        code = main(["--trust-config", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err.splitlines()

    yield call
    leave_distributed()


def expected(run: Path, prompt: str, sampling: Sampling, new: int, sample: int = 0, dtype: str = "float32") -> str:
    """The text that the library generates for this prompt alone."""
    checkpoint, compute_dtype = open_checkpoint(run, CONFIGS, trusted=True), getattr(torch, dtype)
    of_run = tokenizer_of(checkpoint)
    assert of_run is not None
    settings = Settings(new, sampling, stop=of_run.eod_id, num_ids=of_run.vocab_size)
    tokens = of_run.encode_batch([prompt])[0] or [of_run.eod_id]
    model = load_model(checkpoint, compute_dtype=compute_dtype)
    lower_weights(model, compute_dtype)
    (found,) = generate(model, [Request(tokens, sample)], settings)
    leave_distributed()
    return of_run.decode([*tokens, *found.tokens])


def test_a_run_records_texts_of_its_model(run: Path) -> None:
    """The texts come from unquantized weights in the compute dtype, at temperature 0.8 and with the run's seed."""
    first, last = records(run, "text")
    assert (first["step"], last["step"]) == (2, 4) and first["samples"] != last["samples"]
    assert [sample["prompt"] for sample in last["samples"]] == [PROMPT, ""]
    config = open_checkpoint(run, CONFIGS).config
    sampling, dtype = Sampling(0.8, seed=config.run.seed), config.precision.compute_dtype
    whole, after_nothing = (expected(run, prompt, sampling, 7, dtype=dtype) for prompt in (PROMPT, ""))
    assert PROMPT + last["samples"][0]["text"] == whole and after_nothing.endswith(last["samples"][1]["text"])
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert {"text/1/text_summary", "text/2/text_summary"} <= {*board.Tags()["tensors"]}


def test_a_prompt_is_continued(run: Path, cli) -> None:
    once = ["--prompt", PROMPT, "--max-tokens", 20, "--seed"]
    code, out, err = cli(run, *once, 3, "--device", "cpu")
    assert (code, out) == (0, expected(run, PROMPT, Sampling(0.8, 0.95, 3), 20) + "\n")
    assert err[0].startswith(f"{run}/checkpoints/step_00000004: step 4, 2,048 tokens; master weights, float32 on cpu")
    assert cli(run / "checkpoints" / "step_00000004", *once, 3)[1] == out
    assert cli(run, *once, 4)[1] != out != cli(run / "checkpoints" / "step_00000001", *once, 3)[1]


def test_a_run_keeps_its_tokenizer(run: Path, tmp_path: Path) -> None:
    """Commands open the run's copy without consent, unless it is another one or leads elsewhere."""
    mine = Path(shutil.copytree(run, tmp_path / "mine"))
    kept = tokenizer_of(open_checkpoint(mine, CONFIGS))
    assert kept is not None and kept.name == str(mine / "tokenizer")
    (mine / "tokenizer").rename(tmp_path / "moved")
    (mine / "tokenizer").symlink_to(tmp_path / "moved")
    with pytest.raises(ValueError, match="which is not used without your consent"):
        tokenizer_of(open_checkpoint(mine, CONFIGS))
    (mine / "tokenizer").unlink()
    (mine / "tokenizer").mkdir()
    tokenizer().save(mine / "tokenizer/tokenizer.json")
    with pytest.raises(ValueError, match="which is not used without your consent"):
        tokenizer_of(open_checkpoint(mine, CONFIGS))


def test_several_prompts_from_a_file_and_several_samples(run: Path, cli, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("return\n\n  if é\n", encoding="utf-8")
    many = [run, "--prompt", PROMPT, "--file", tmp_path / "prompts", "--samples", 2, "--max-tokens", 9, "--batch", 4]
    code, out, _ = cli(*many)
    assert code == 0 and out == "".join(
        f"--- prompt {number}, sample {sample + 1}\n{expected(run, prompt, Sampling(0.8, 0.95), 9, sample)}\n"
        for number, prompt in enumerate((PROMPT, "return", "  if é"), start=1)
        for sample in range(2)
    )


def test_the_prompt_may_come_from_standard_input(run: Path, cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\nimport \n"))
    code, out, _ = cli(run, "--temperature", 0, "--max-tokens", 8)
    assert (code, out) == (0, expected(run, "import os\nimport ", Sampling(), 8) + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, out, err = cli(run)
    assert (code, out) == (2, "") and "there is no prompt" in err[0]


def test_weights_as_trained_follow_the_plan_in_effect(run: Path) -> None:
    """After a switch to BF16 no weight is quantized."""
    checkpoint = open_checkpoint(run, CONFIGS)
    overrides = ["precision.switch.when=2", "precision.switch.target=bf16"]
    checkpoint.config = config_from_saved(checkpoint.trainer["config"], overrides, CONFIGS, opens_data=False)
    options = parse([str(run), "--weights", "trained"])
    try:
        assert load(checkpoint, options)[1] == "weights of 6 of 8 linears as trained"
        checkpoint.trainer["switch"]["switched_at"] = 1
        with pytest.raises(ValueError, match="in the forward pass since the precision switch; use --weights master"):
            load(checkpoint, options)
    finally:
        leave_distributed()


def test_wrong_input_gives_one_line(run: Path, cli, tmp_path: Path) -> None:
    bare, damaged = (checkpoint_of(tmp_path / name, "transformer").folder for name in ("bare", "damaged"))
    flip_a_bit(next(damaged.glob("*.distcp")))
    tokenizer().save(tmp_path / "tokenizer.json")
    its_own = ["--tokenizer", tmp_path / "tokenizer.json"]
    for arguments, wrong in (
        (["nowhere"], "nowhere is not a folder"),
        ([run, "--batch", "0"], "--batch 0 is less than 1"),
        ([run, "--samples", "2", "--temperature", "0"], "would all be equal"),
        ([run, "--prompt", "b", "--max-tokens", "1" + 12 * "0"], "not enough memory"),
        ([bare], "has no tokenizer; give the one that made its data as --tokenizer PATH"),
        ([bare, *its_own, "--weights", "trained"], "has no linear whose weights were quantized in the forward pass"),
        ([damaged, *its_own], "has changed since it was written"),
    ):
        code, out, err = cli(*arguments, "--prompt", "a")
        assert (code, out) == (2, "") and wrong in err[-1]
        assert [line.startswith("generate.py: ") for line in err].count(True) == 1


def test_ctrl_c_during_a_text_ends_without_a_traceback(run: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--trust-config", str(run)]
    process = subprocess.Popen(
        as_child([*command, "--prompt", "the quick", "--max-tokens", "100000", "--temperature", "2"]),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.read(9) == "the quick"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err
