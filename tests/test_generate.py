"""scripts/generate.py as its user starts it, with the checkpoint of a small run that wrote texts itself."""

from __future__ import annotations

import io
import os
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
from inference.generation import Request, Sampling, Settings, generate, lower_weights, prompt_tokens
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.parallel.mesh import leave_distributed
from pretrain import CONFIGS
from scripts.generate import load, main, parse
from tests.exchange.models import checkpoint_of, strong_model, tensors_of
from tests.models.builders import small_config
from tests.test_pretrain import ROOT, SMALL, records
from tests.training.harness import alone

pytestmark = pytest.mark.slow
PROMPT = "def naïve("


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate") / "run"
    own = ["train.steps=4", "validation.interval=2", "validation.num_samples=2", "precision.switch.when=never"]
    texts = [f'validation.prompts=["{PROMPT}",""]', "validation.prompt_tokens=7"]
    assert pretrain.main([*SMALL, *own, *texts, "data.num_workers=0", f"run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    """What a command with these arguments prints: (exit code, stdout, lines of stderr)."""

    def call(*arguments: object) -> tuple[int, str, list[str]]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err.splitlines()

    yield call
    leave_distributed()


def expected(run: Path, prompt: str, sampling: Sampling, new: int, sample: int = 0) -> str:
    """By the library, all at once."""
    checkpoint = open_checkpoint(run, CONFIGS)
    tokenizer = tokenizer_of(checkpoint)
    assert tokenizer is not None
    settings = Settings(new, sampling, stop=tokenizer.eod_id, num_ids=tokenizer.vocab_size)
    (tokens,) = tokenizer.encode_batch([prompt])
    (found,) = generate(load_model(checkpoint), [Request(tokens, sample)], settings)
    leave_distributed()
    return tokenizer.decode([*tokens, *found.tokens])


def test_a_run_records_what_its_model_says(run: Path) -> None:
    events = [event for event in records(run, "event") if event["event"] == "text"]
    assert [event["step"] for event in events] == [2, 4]
    for event in events:
        assert [sample["prompt"] for sample in event["samples"]] == [PROMPT, ""]
        assert all(sample["text"] or sample["ended"] for sample in event["samples"])
    assert events[0]["samples"] != events[1]["samples"]
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert {"text/1/text_summary", "text/2/text_summary"} <= {*board.Tags()["tensors"]}


def test_these_texts_are_of_weights_that_are_not_quantized(run: Path) -> None:
    """In the compute dtype, at the temperature and with the seed that the documentation says."""
    checkpoint = open_checkpoint(run, CONFIGS)
    tokenizer, config = tokenizer_of(checkpoint), checkpoint.config
    assert tokenizer is not None
    dtype = getattr(torch, config.precision.compute_dtype)
    model = load_model(checkpoint, compute_dtype=dtype)
    lower_weights(model, dtype)
    settings = Settings(7, Sampling(0.8, seed=config.run.seed), stop=tokenizer.eod_id, num_ids=tokenizer.vocab_size)
    prompts = [prompt_tokens(tokenizer, prompt) for prompt in (PROMPT, "")]
    found = generate(model, [Request(prompt) for prompt in prompts], settings)
    leave_distributed()
    whole = [tokenizer.decode([*prompt, *texts.tokens]) for prompt, texts in zip(prompts, found, strict=True)]
    (said,) = [e["samples"] for e in records(run, "event") if e["event"] == "text" and e["step"] == checkpoint.step]
    assert [sample["prompt"] + sample["text"] for sample in said] == whole


def test_a_prompt_and_its_continuation(run: Path, said) -> None:
    code, out, err = said(run, "--prompt", PROMPT, "--max-tokens", 20, "--seed", 3, "--device", "cpu")
    assert code == 0
    assert out == expected(run, PROMPT, Sampling(0.8, 0.95, 3), 20) + "\n"
    assert err[0].startswith(f"{run}/checkpoints/step_00000004: step 4, 2,048 tokens; master weights, float32 on cpu")
    assert err[-1].endswith("a second)")
    again = said(run / "checkpoints" / "step_00000004", "--prompt", PROMPT, "--max-tokens", 20, "--seed", 3)
    assert again[1] == out
    assert said(run, "--prompt", PROMPT, "--max-tokens", 20, "--seed", 4)[1] != out
    # Another step's checkpoint is another model.
    assert said(run / "checkpoints" / "step_00000001", "--prompt", PROMPT, "--max-tokens", 20, "--seed", 3)[1] != out


def test_several_prompts_from_a_file_and_several_samples(run: Path, said, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("return\n\n  if é\n", encoding="utf-8")
    many = [run, "--prompt", PROMPT, "--file", tmp_path / "prompts", "--samples", 2, "--max-tokens", 9]
    code, out, _ = said(*many)
    assert code == 0
    wanted = [
        f"--- prompt {number}, sample {sample + 1}\n{expected(run, prompt, Sampling(0.8, 0.95), 9, sample)}\n"
        for number, prompt in enumerate((PROMPT, "return", "  if é"), start=1)
        for sample in range(2)
    ]
    assert out == "".join(wanted)
    assert said(*many, "--batch", 4)[1] == out


def test_what_is_piped_in_is_a_prompt(run: Path, said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\nimport \n"))
    code, out, _ = said(run, "--temperature", 0, "--max-tokens", 8)
    assert (code, out) == (0, expected(run, "import os\nimport ", Sampling(), 8) + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, out, err = said(run)
    assert (code, out) == (2, "") and "there is no prompt" in err[0]


def test_weights_as_trained_are_those_of_the_plan_in_effect(run: Path) -> None:
    """Behind a switch to BF16 nothing is quantized any more."""
    checkpoint = open_checkpoint(run, CONFIGS)
    overrides = ["precision.switch.when=2", "precision.switch.target=bf16"]
    checkpoint.config = config_from_saved(checkpoint.trainer["config"], overrides, CONFIGS)
    options = parse([str(run), "--weights", "trained"])
    try:
        assert load(checkpoint, options)[1] == "weights of 6 of 8 linears as they were trained"
        checkpoint.trainer["switch"]["switched_at"] = 1
        with pytest.raises(ValueError, match="in the forward pass since the precision switch; leave it at master"):
            load(checkpoint, options)
    finally:
        leave_distributed()


REFUSED = {
    "no folder": (["nowhere", "--prompt", "a"], "nowhere is not a folder"),
    "batch": (["RUN", "--prompt", "a", "--batch", "0"], "--batch 0 is less than 1"),
    "equal samples": (["RUN", "--prompt", "a", "--samples", "2", "--temperature", "0"], "would all be the same"),
    "no ids": (["RUN", "--prompt", "a", "--raw"], "the prompt 'a' is no list of token ids"),
    "unknown ids": (["RUN", "--prompt", "512", "--raw"], "has the token 512; the model has ids from 0 to 511"),
    "memory": (["RUN", "--prompt", "a", "--prompt", "b", "--max-tokens", "1" + 12 * "0"], "not enough memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_one_line(run: Path, said, name: str) -> None:
    arguments, wrong = REFUSED[name]
    code, out, err = said(*[run if argument == "RUN" else argument for argument in arguments])
    assert (code, out) == (2, "")
    assert err[-1].startswith("generate.py: ") and wrong in err[-1]
    assert len([line for line in err if line.startswith("generate.py")]) == 1


def test_weights_alone(said, tmp_path: Path) -> None:
    """Of an import without a tokenizer: ids only, and nothing was trained here."""
    config = small_config(pattern="M*")
    with alone() as mesh:
        checkpoint_of(tmp_path / "c", config, tensors_of(strong_model(config, mesh)))
    code, _, err = said(tmp_path / "c", "--prompt", "a")
    assert code == 2 and "knew of no tokenizer; give the one that made its data as --tokenizer PATH" in err[-1]
    code, out, _ = said(tmp_path / "c", "--raw", "--prompt", "1", "--max-tokens", 5)
    assert code == 0 and len(out.split()) == 6
    code, _, err = said(tmp_path / "c", "--raw", "--prompt", "1", "--weights", "trained")
    assert code == 2 and "has no linear whose weights were quantized in the forward pass" in err[-1]


def test_ctrl_c_ends_without_a_traceback(run: Path) -> None:
    """Before torch is imported, too; here while it writes."""
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), str(run), "--raw", "--prompt", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--max-tokens", "1000000", "--temperature", "0"],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.read(4).startswith("1 ")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err
