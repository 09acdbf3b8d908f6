"""scripts/evaluate.py by lm-eval and transformers, in one process: scores against lm-eval's own class and sums by hand;
the table; what is refused."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.builtin import CODE, PROSE
from exchange.checkpoint import Checkpoint
from inference import tasks
from inference.models import open_folder
from inference.tasks import _manager as manager
from megatron_fp4.parallel.mesh import leave_distributed
from scripts import evaluate
from tests.inference.folders import MODELS, TEXT, checkpoint_of, folder_of, tokenizer
from tests.inference.test_tasks import corpus

pytestmark = pytest.mark.slow

WORDS = TEXT.split()
SHORT, LONG = " ".join(WORDS[:3]), " ".join(WORDS * 12)  # one token window, and several


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Checkpoint]]:
    place = tmp_path_factory.mktemp("checkpoints")
    yield {name: checkpoint_of(place / name, name) for name in MODELS}
    leave_distributed()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Checkpoint]) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("folders")
    return {name: folder_of(place / name, checkpoint) for name, checkpoint in checkpoints.items()}


@pytest.fixture(scope="module")
def task_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local tasks of every kind: a choice, a text, an answer to generate."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [
        {
            "id": n,
            "text": " ".join(WORDS[n:] + WORDS[:n]) * (1 + 4 * (n % 3)),
            "choices": WORDS[n : n + 4],
            "answer": n % 4,
        }
        for n in range(10)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = f"{{data_files: {{test: {folder}/data.jsonl}}, cache_dir: {folder}/cache}}"
    head = f"dataset_path: json\ndataset_kwargs: {data}\n"
    choice = "doc_to_text: text\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    text = "doc_to_text: ''\nnum_fewshot: 0\ndoc_to_target: text\n"
    write = "doc_to_text: text\ndoc_to_target: '{{choices[0]}}'\ngeneration_kwargs: {until: ['.'], max_gen_toks: 6}\n"
    for name, kind, what, metrics in (
        ("choice", "multiple_choice", choice, "[{metric: acc_norm}, {metric: acc}]"),
        ("text", "loglikelihood_rolling", text, "[{metric: bits_per_byte}]"),
        ("write", "generate_until", write, "[{metric: exact_match}]"),
    ):
        content = f"task: fox_{name}\n{head}output_type: {kind}\ntest_split: test\n{what}metric_list: {metrics}\n"
        (folder / f"{name}.yaml").write_text(content)
    more = (folder / "choice.yaml").read_text().replace("fox_choice", "fox_more").replace("data.jsonl", "more.jsonl")
    (folder / "more.yaml").write_text(more)
    (folder / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[3:9]))
    aggregate = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    (folder / "all.yaml").write_text(f"group: fox_group\ntask: [fox_choice, fox_more]\n{aggregate}")
    return folder


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    """As lm-eval makes them."""
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.mark.parametrize("name", MODELS)
def test_log_likelihoods_are_those_of_lm_evals_own_class(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With logits a few at a time: choices that share a context, a context that is too long, a whole text."""
    from lm_eval.models.huggingface import HFLM

    from inference.evaluation import FolderModel

    monkeypatch.setattr("inference.models._LOGITS", 3 * 300)
    opened = open_folder(folders[name], "cpu")
    theirs = HFLM(pretrained=opened.model, tokenizer=opened.tokenizer, backend="causal", batch_size=3)
    model = FolderModel(opened)
    pairs = [(SHORT, f" {word}") for word in WORDS[:6]] + [(LONG, " fox jumps"), ("", SHORT), (SHORT, " quick brown")]
    for ours, other in zip(model.loglikelihood(requests(*pairs)), theirs.loglikelihood(requests(*pairs)), strict=True):
        assert ours[0] == pytest.approx(other[0], abs=1e-4) and ours[1] == other[1]
    context = opened.tokenizer.encode(SHORT)
    with torch.no_grad():
        greedy = int(opened.model(torch.tensor([context])).logits[0, -1].argmax())
    followed = model._loglikelihood_tokens([(None, context, [greedy]), (None, context, [(greedy + 1) % 300])])
    assert [is_greedy for _, is_greedy in followed] == [True, False]
    texts = requests((SHORT,), (LONG,), (TEXT,))
    assert model.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)


@pytest.fixture(scope="module")
def examined(folders: dict[str, Path], checkpoints: dict[str, Checkpoint], task_files: Path) -> dict[str, Any]:
    """Three tasks on two models, one of them a checkpoint; the record."""
    record = task_files / "scores.json"
    names = [f"folder={folders['hybrid']}", f"other={checkpoints['transformer'].folder}"]
    tasks = ["--tasks", "fox_*", "--include-path", str(task_files), "--device", "cpu", "--batch-size", "4"]
    tokenizer().save(task_files / "tokenizer.json")
    tasks += ["--tokenizer", str(task_files / "tokenizer.json")]
    assert evaluate.main([*names, *tasks, "--json", str(record)]) == 0
    return json.loads(record.read_text())


def result(record: dict[str, Any], task: str, metric: str) -> dict[str, Any]:
    return next(each for each in record["results"] if (each["task"], each["metric"]) == (task, metric))


def test_the_record_adds_up(examined: dict[str, Any], folders: dict[str, Path]) -> None:
    """Scores, errors and differences again, from the documents."""
    documents = {
        (model, each["task"], each["metric"]): [value for _, _, value in each["documents"]]
        for model, tasks in examined["documents"].items()
        for each in tasks
    }
    chosen = result(examined, "fox_choice", "acc")
    first, other = (documents[model, "fox_choice", "acc"] for model in ("folder", "other"))
    assert chosen["scores"]["folder"]["value"] == pytest.approx(statistics.fmean(first))
    assert chosen["scores"]["folder"]["stderr"] == pytest.approx(statistics.stdev(first) / math.sqrt(10))
    apart = [b - a for a, b in zip(first, other, strict=True)]
    found = chosen["differences_to_first"]["other"]
    assert found["value"] == pytest.approx(statistics.fmean(apart)) and found["paired"]
    assert found["margin_95"] == pytest.approx(2.2622 * statistics.stdev(apart) / math.sqrt(10), rel=1e-4)
    bits = result(examined, "fox_text", "bits_per_byte")
    for model in ("folder", "other"):
        pairs = documents[model, "fox_text", "bits_per_byte"]
        assert all(nats < 0 for nats, _ in pairs) and len(pairs) == 10
        total = -sum(nats for nats, _ in pairs) / sum(length for _, length in pairs) / math.log(2)
        assert bits["scores"][model]["value"] == pytest.approx(total)
        assert 0 < bits["scores"][model]["stderr"] < total
    group = result(examined, "fox_group", "acc")
    answers = [each for task in ("fox_choice", "fox_more") for each in documents["folder", task, "acc"]]
    assert len(answers) == 16 and group["scores"]["folder"]["value"] == pytest.approx(statistics.fmean(answers))
    assert group["scores"]["folder"]["stderr"] == pytest.approx(statistics.stdev(answers) / 4)
    assert group["differences_to_first"]["other"]["paired"]
    assert bits["higher_is_better"] is False and chosen["higher_is_better"] is True
    tasks = {"fox_choice", "fox_more", "fox_text", "fox_write", "fox_group"}
    assert {each["task"] for each in examined["results"]} == tasks
    assert examined["models"]["folder"]["path"] == str(folders["hybrid"])
    assert examined["models"]["folder"]["stored_dtype"] == "float32" and examined["models"]["other"]["step"] == 0
    assert {"lm_eval", "transformers", "torch", "python"} <= examined["versions"].keys()
    assert examined["tasks"]["fox_text"]["documents"] == 10 and len(examined["tasks"]["fox_text"]["sha256"]) == 64
    assert examined["command"][0] == "evaluate.py" and "--batch-size" in examined["command"]


def test_a_model_that_cannot_be_examined_takes_no_scores_with_it(
    folders: dict[str, Path], task_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    record = tmp_path / "scores.json"
    models = [str(folders["hybrid"]), str(tmp_path / "broken")]
    assert evaluate.main([*models, "--tasks", str(task_files / "text.yaml"), "--json", str(record)]) == 2
    said = capsys.readouterr()
    assert "| fox_text" in said.out and "broken cannot be loaded" in said.err
    assert set(json.loads(record.read_text())["models"]) == {"hybrid"}


def test_shipped_tasks_run(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tasks, "collect_documents", lambda library: corpus())
    monkeypatch.setattr(tasks, "check_enough", lambda documents, library: None)
    record = tmp_path / "scores.json"
    assert evaluate.main([str(folders["transformer"]), "--limit", "6", "--json", str(record)]) == 0
    found = {(each["task"], each["metric"]) for each in json.loads(record.read_text())["results"]}
    sources = (CODE, PROSE)
    expected = {(f"builtin_cloze_{source}", metric) for source in sources for metric in ("acc_norm", "acc")}
    for metric in ("bits_per_byte", "byte_perplexity", "word_perplexity"):
        expected |= {(f"builtin_bytes_{source}", metric) for source in sources}
    assert found == expected
    assert "| builtin_cloze_code  | acc_norm (higher is better)" in capsys.readouterr().out


def without_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop(next(name for name in tensors if name.endswith("up_proj.weight")))
    save_file(tensors, file, metadata={"format": "pt"})


def in_another_layout(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "modelopt"}}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (in_another_layout, r"is in the layout of modelopt, .* --format nvfp4-compressed-tensors, or without"),
        (without_weight, r"is not a whole model: missing keys .*up_proj.weight; export it again"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    damage: Callable[[Path], None],
    message: str,
    checkpoints: dict[str, Checkpoint],
    task_files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = folder_of(tmp_path / "folder", checkpoints["transformer"])
    damage(folder)
    assert evaluate.main([str(folder), "--tasks", str(task_files / "text.yaml")]) == 2
    refusal = capsys.readouterr().err
    assert re.search(message, refusal) and refusal.count("\n") == 1 and refusal.startswith("evaluate.py: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}", "--tasks", "fox_chioce"], "there is no task 'fox_chioce'; did you mean fox_choice"),
        (["{folder}", "--tasks", "fox_text", "--num-fewshot", "2"], "task fox_text takes no examples"),
        (["{folder}", "{folder}", "--tasks", "fox_text"], "two models are called hybrid; name them"),
        (["{folder}", "--tasks", "fox_gone"], "task fox_gone cannot be loaded .*gone.jsonl"),
        (["{folder}", "--tasks", "fox_text", "--device", "cuda:77"], "--device cuda:77 is not here"),
        (["{folder}", "--tasks", "fox_write", "--max-length", "4"], "lm-eval refuses hybrid: .*must be less than"),
        (["{folder}", "--tasks", "fox_text", "--tokenizer", "x"], "--tokenizer x is for checkpoints, and folders have"),
        (["{checkpoint}", "--tasks", "fox_text"], "its run knew of no tokenizer; give the one of its data"),
        (["/nowhere", "--tasks", "fox_text"], "/nowhere is not a folder; give a checkpoint"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(
    arguments: list[str],
    message: str,
    folders: dict[str, Path],
    checkpoints: dict[str, Checkpoint],
    task_files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "_manager", lambda include, own: manager(include, False))  # thousands of files
    gone = (task_files / "text.yaml").read_text().replace("fox_text", "fox_gone").replace("data.jsonl", "gone.jsonl")
    (task_files / "gone.yaml").write_text(gone)
    try:
        checkpoint = checkpoints["hybrid"].folder
        given = [text.format(folder=folders["hybrid"], checkpoint=checkpoint) for text in arguments]
        assert evaluate.main([*given, "--include-path", str(task_files)]) == 2
    finally:
        (task_files / "gone.yaml").unlink()
    refusal = capsys.readouterr().err
    assert re.search(message, refusal) and refusal.count("\n") == 1
