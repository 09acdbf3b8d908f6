"""scripts/evaluate.py with lm-eval and transformers: scores, against sums by hand; the table; refusals."""

import json
import math
import random
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from data.builtin import CODE, PROSE
from exchange.checkpoint import Checkpoint
from inference import tasks
from inference.tasks import _manager as manager
from megatron_fp4.parallel.mesh import leave_distributed
from scripts import evaluate
from tests.inference.folders import MODELS, TEXT, checkpoint_of, folder_of, tokenizer
from tests.inference.test_tasks import corpus
from tests.programs import error_line

pytestmark = pytest.mark.slow
WORDS = TEXT.split()


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
    """A folder of local tasks: two of multiple choice and their group, a text, generation, and one without data."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"text": " ".join(WORDS[n:] + WORDS[:n]) * (1 + 4 * (n % 3)), "answer": n % 4} for n in range(10)]
    lines = [json.dumps({"id": n, "choices": WORDS[n : n + 4], **row}) + "\n" for n, row in enumerate(rows)]
    (folder / "data.jsonl").write_text("".join(lines))
    (folder / "more.jsonl").write_text("".join(lines[3:9]))
    choice = "doc_to_text: text\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    text = "doc_to_text: ''\nnum_fewshot: 0\ndoc_to_target: text\n"
    write = "doc_to_text: text\ndoc_to_target: '{{choices[0]}}'\ngeneration_kwargs: {until: ['.'], max_gen_toks: 6}\n"
    for name, data, kind, what, metrics in (
        ("choice", "data", "multiple_choice", choice, "[{metric: acc_norm}, {metric: acc}]"),
        ("more", "more", "multiple_choice", choice, "[{metric: acc_norm}, {metric: acc}]"),
        ("text", "data", "loglikelihood_rolling", text, "[{metric: bits_per_byte}]"),
        ("write", "data", "generate_until", write, "[{metric: exact_match}]"),
        ("gone", "gone", "loglikelihood_rolling", text, "[{metric: bits_per_byte}]"),
    ):
        files = f"{{data_files: {{test: {folder}/{data}.jsonl}}, cache_dir: {folder}/cache}}"
        content = (
            f"task: fox_{name}\ndataset_path: json\ndataset_kwargs: {files}\noutput_type: {kind}\ntest_split: test"
        )
        (folder / f"{name}.yaml").write_text(f"{content}\n{what}metric_list: {metrics}\n")
    aggregate = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    (folder / "all.yaml").write_text(f"group: fox_group\ntask: [fox_choice, fox_more]\n{aggregate}")
    return folder


def test_the_record_agrees_with_its_documents(
    folders: dict[str, Path], checkpoints: dict[str, Checkpoint], task_files: Path
) -> None:
    """Scores, errors and differences of three tasks and a group, on a folder and a checkpoint, follow from the recorded
    scores of the documents."""
    tokenizer().save(task_files / "tokenizer.json")
    names = [f"folder={folders['hybrid']}", f"other={checkpoints['transformer'].folder}"]
    names += ["--tasks", "fox_choice,fox_text,fox_write,fox_group", "--tokenizer", f"{task_files}/tokenizer.json"]
    names += ["--include-path", str(task_files), "--device", "cpu", "--batch-size", "4"]
    assert evaluate.main([*names, "--json", str(task_files / "scores.json")]) == 0
    record = json.loads((task_files / "scores.json").read_text())
    documents = {
        (model, each["task"], each["metric"]): [value for _, _, value in each["documents"]]
        for model, tasks in record["documents"].items()
        for each in tasks
    }
    results = {(each["task"], each["metric"]): each for each in record["results"]}
    chosen, bits = results["fox_choice", "acc"], results["fox_text", "bits_per_byte"]
    first, other = (documents[model, "fox_choice", "acc"] for model in ("folder", "other"))
    assert chosen["scores"]["folder"]["value"] == pytest.approx(statistics.fmean(first))
    assert chosen["scores"]["folder"]["stderr"] == pytest.approx(statistics.stdev(first) / math.sqrt(10))
    apart, found = [b - a for a, b in zip(first, other, strict=True)], chosen["differences_to_first"]["other"]
    assert found["value"] == pytest.approx(statistics.fmean(apart)) and found["paired"]
    assert found["margin_95"] == pytest.approx(2.2622 * statistics.stdev(apart) / math.sqrt(10), rel=1e-4)
    for model in ("folder", "other"):
        pairs = documents[model, "fox_text", "bits_per_byte"]
        total = -sum(nats for nats, _ in pairs) / sum(length for _, length in pairs) / math.log(2)
        assert len(pairs) == 10 and bits["scores"][model]["value"] == pytest.approx(total)
    answers = [each for task in ("fox_choice", "fox_more") for each in documents["folder", task, "acc"]]
    group = results["fox_group", "acc"]
    assert len(answers) == 16 and group["scores"]["folder"]["value"] == pytest.approx(statistics.fmean(answers))
    assert group["scores"]["folder"]["stderr"] == pytest.approx(statistics.stdev(answers) / 4)
    assert group["differences_to_first"]["other"]["paired"]
    assert bits["higher_is_better"] is False and chosen["higher_is_better"] is True
    assert record["models"]["folder"]["path"] == str(folders["hybrid"]) and record["models"]["other"]["step"] == 0
    assert record["tasks"]["fox_text"]["documents"] == 10 and len(record["tasks"]["fox_text"]["sha256"]) == 64
    assert {"lm_eval", "transformers", "torch", "python"} <= record["versions"].keys()


def test_a_model_that_cannot_be_loaded_does_not_lose_the_scores_of_others(
    folders: dict[str, Path], task_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    models, record = [str(folders["hybrid"]), str(tmp_path / "broken")], tmp_path / "scores.json"
    assert evaluate.main([*models, "--tasks", str(task_files / "text.yaml"), "--json", str(record)]) == 2
    said = capsys.readouterr()
    assert "| fox_text" in said.out and "broken cannot be loaded" in said.err
    assert set(json.loads(record.read_text())["models"]) == {"hybrid"}


def test_shipped_tasks_run(folders: dict[str, Path], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tasks, "_items", lambda: tasks.make_items(corpus()))
    record = tmp_path / "scores.json"
    assert evaluate.main([str(folders["transformer"]), "--limit", "6", "--json", str(record)]) == 0
    found = {(each["task"], each["metric"]) for each in json.loads(record.read_text())["results"]}
    metrics = {"cloze": ("acc_norm", "acc"), "bytes": ("bits_per_byte", "byte_perplexity", "word_perplexity")}
    shipped = [f"builtin_{kind}_{source}" for kind in ("bytes", "cloze") for source in (CODE, PROSE)]
    assert found == {(name, metric) for name in shipped for metric in metrics[name.split("_")[1]]}
    assert "| builtin_cloze_code  | acc_norm (higher is better)" in capsys.readouterr().out


def use_another_layout(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "modelopt"}}))


def remove_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(next(name for name in tensors if name.endswith("up_proj.weight")))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def bring_code(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(f"open({str(folder.with_name('ran'))!r}, 'w')\nclass Own: ...\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{code} --tasks fox_text", "cannot be loaded by transformers: .*custom code"),
        ("{link} --tasks fox_text", "chat_template.jinja is a link, a pipe or a device"),
        ("{folder} --tasks fox_chioce", "there is no task 'fox_chioce'; did you mean fox_choice"),
        ("{folder} --tasks fox_text --num-fewshot 2", "task fox_text takes no examples"),
        ("{folder} {folder} --tasks fox_text", "two models have the name hybrid; name them"),
        ("{folder} --tasks fox_gone", "task fox_gone cannot be loaded .*gone.jsonl"),
        ("{folder} --tasks fox_text --device cuda:77", "--device cuda:77 cannot be used"),
        ("{folder} --tasks fox_write --max-length 4", r"refuses hybrid \(.*must be less than.*\); raise --max-length"),
        ("{folder} --tasks fox_text --tokenizer x", "--tokenizer x is for checkpoints; folders have"),
        ("{checkpoint} --tasks fox_text", "its run has no tokenizer; give the one of its data"),
        ("{layout} --tasks fox_text", r"has the layout of modelopt, .* --format nvfp4-compressed-tensors, or without"),
        ("{part} --tasks fox_text", r"is not a complete model: missing keys .*up_proj.weight; export it again"),
    ],
)
def test_wrong_input_gives_one_line(
    arguments: str,
    message: str,
    folders: dict[str, Path],
    checkpoints: dict[str, Checkpoint],
    task_files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without lm-eval's own tasks, which are thousands of files.
    monkeypatch.setattr(tasks, "_manager", lambda include, own: manager(include, False))
    places = {"folder": folders["hybrid"], "checkpoint": checkpoints["hybrid"].folder}
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the answer to "Do you wish to run the custom code?"
    changes = {"layout": use_another_layout, "part": remove_a_weight, "code": bring_code}
    changes["link"] = lambda folder: (folder / "chat_template.jinja").symlink_to("/etc/hostname")
    for name, damage in changes.items():
        if f"{{{name}}}" in arguments:
            places[name] = folder_of(tmp_path / name, checkpoints["transformer"])
            damage(places[name])
    assert evaluate.main([*arguments.format(**places).split(), "--include-path", str(task_files)]) == 2
    assert re.search(message, error_line(capsys, "evaluate.py")) and not (tmp_path / "ran").exists()


STATISTICS = {
    "bits": lambda pairs: -sum(a for a, _ in pairs) / sum(b for _, b in pairs) / math.log(2),
    "perplexity": lambda pairs: math.exp(-sum(a for a, _ in pairs) / sum(b for _, b in pairs)),
}


def scored(name: str, pairs: list[tuple[float, int]]) -> Any:
    from inference.evaluation import score

    return score(STATISTICS[name](pairs), None, {(number, "hash"): pair for number, pair in enumerate(pairs)})


def pairs_of(count: int, seed: int) -> list[tuple[float, int]]:
    draws = random.Random(seed)
    lengths = [draws.randrange(20, 200) for _ in range(count)]
    return [(-length * draws.gauss(1.5, 0.3), length) for length in lengths]


@pytest.mark.parametrize("name", STATISTICS)
def test_the_error_of_a_quotient_is_that_of_the_jackknife(name: str) -> None:
    pairs, statistic = pairs_of(200, 1), STATISTICS[name]
    left_out = [statistic(pairs[:i] + pairs[i + 1 :]) for i in range(len(pairs))]
    jackknife = math.sqrt(199 / 200 * sum((x - statistics.fmean(left_out)) ** 2 for x in left_out))
    assert scored(name, pairs).stderr == pytest.approx(jackknife, rel=0.02)


def test_the_error_of_a_paired_difference_is_smaller() -> None:
    """The paired error is the standard deviation of the difference over new sets of documents; the unpaired one is many
    times as large. A statistic that is neither a mean nor a quotient, such as F1, has lm-eval's error, unpaired."""
    from inference.evaluation import Score, difference, score

    found = []
    for seed in range(300):
        first, draws = pairs_of(80, seed), random.Random(seed + 10**6)
        other = [(a - b * draws.gauss(0.02, 0.02), b) for a, b in first]
        found.append(difference(scored("bits", first), scored("bits", other)))
    spread = statistics.stdev(each.value for each in found)
    assert all(each.paired for each in found)
    assert statistics.fmean(each.margin for each in found) == pytest.approx(1.99 * spread, rel=0.15)
    errors = [scored("bits", pairs).stderr for pairs in (first, other)]
    alone = difference(Score(0.0, errors[0]), Score(0.1, errors[1]))
    assert not alone.paired and alone.margin == pytest.approx(1.96 * math.hypot(*errors), rel=1e-3)
    assert alone.margin > 8 * spread
    f1 = score(0.75, 0.1, {(number, "hash"): pair for number, pair in enumerate([(1, 1), (0, 1), (1, 0)])})
    assert (f1.value, f1.stderr, f1.influences) == (0.75, 0.1, None)
    assert difference(f1, Score(0.5, None)).margin is None
