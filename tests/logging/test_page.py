"""The page about a run: what stands in it, of runs of now and of old ones, and that it needs nothing besides itself."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.config.schema import Config, ConfigError, LoggingConfig, RunConfig
from megatron_fp4.logging.page import write_report
from megatron_fp4.logging.run_folder import check_baseline

DEFAULTS = {
    "train": {"steps": 300, "lr": 0.1},
    "data": {"phases": [{"name": "main", "fraction": None}]},
    "new": {"a": 1},
}


def write_run(folder: Path, gap: float = 0.0, **extra: Any) -> Path:
    folder.mkdir(parents=True)
    facts = {"steps": 40, "unigram_entropy": {"code": 6.0}, "parameters": 4_766_000, "quantized_flops": 0.42}
    lines: list[dict[str, Any]] = [{"kind": "run", "step": 0, **facts, "decay_start": 30}]
    for step in range(1, 41):
        lines.append(
            {"kind": "step", "step": step, "tokens": 100 * step, "loss": None if step == 7 else 5 - step / 20 + gap,
             "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1e3, "model_tflops": 0.5, "step_time": 0.5,
             "data_wait": 0.05, "skipped": step == 7, "phase": "broad" if step < 20 else "<b>", "plan": "nvfp4",
             "peak_memory_gib": 12.5 if step % 10 == 0 else None}
        )  # fmt: skip
        if step % 10 == 0:
            lines.append({"kind": "validation", "step": step, "losses": {"code": 5 - step / 20 + gap, "prose": 6.0}})
            lines.append({"kind": "event", "step": step, "event": "checkpoint", "path": "x", "stall": 0.25})
    lines += [
        {"kind": "event", "step": 7, "event": "skip", "in_row": 1},
        {"kind": "event", "step": 31, "event": "switch", "target": "bf16", "scope": "both"},
        {"kind": "event", "step": 40, "event": "text", "samples": [{"prompt": "def", "text": " <f>()", "ended": True}]},
        *extra.pop("records", []),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(
        "train: {steps: 40, lr: 0.1}\n"
        "data: {seed: 3, phases: [{name: broad, fraction: 0.5, blend: {code: 1}}, {name: <b>, fraction: 0.5}]}\n"
        "run: {seed: 7}\nmodel: {name: tiny, pattern: M*-, hidden_dim: 64}\n"
    )
    (folder / "plan.yaml").write_text(
        "quantized_linears: 8 of 12\n"
        "linears: {a: {recipe: nvfp4, why: the run's recipe}, b: {recipe: bf16, why: last}}\n"
        "recipes: {nvfp4: ['fprop x|W: nvfp4 1x16 | nvfp4 16x16'], bf16: ['fprop x|W: bf16 | bf16']}\n"
    )
    (folder / "state.json").write_text(json.dumps({"state": "finished", "step": 40}))
    return folder


class Page(HTMLParser):
    """Tags, their attributes, and all text of a page; fails where tags do not close."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.source = path.read_text()
        self.feed(self.source)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "

    def section(self, title: str) -> str:
        (found,) = re.findall(rf"<section[^>]*><h2>{re.escape(title)}</h2>.*?</section>", self.source, re.DOTALL)
        return str(found)


def test_a_page_says_what_the_run_was(tmp_path: Path) -> None:
    page = Page(write_report([write_run(tmp_path / "run")], defaults=DEFAULTS))
    text = re.sub(r"\s+", " ", page.text)
    for words in (
        "state finished", "steps 40 of 40", "tiny, 4.77M parameters, 3 blocks (M*-), width 64", "seed 7, of the data 3",
        "nvfp4 for 75% of the steps, from step 31 on bf16", "8 of 12 linears (nvfp4), 42.0% of the model's FLOPs",
        "of it waiting for data 10.00%", "peak memory of the first device 12.5 GiB", "steps skipped 1",
        "3.0000 nats per token; 3.000 below the unigram entropy (step 40)",
        "broad 0.5 of the run code 1 1 to 19", "31 switch target: bf16; scope: both", "7 skip in_row: 1",
        "4 checkpoints saved, the last of step 40; training stood still 0.25 s at most", "def <f>()",
        "nvfp4 1 of 2 the run's recipe (1) fprop x|W: nvfp4 1x16 | nvfp4 16x16", "bf16 1 of 2 last (1)",
        "train.steps 300 40", "wall time unknown; its steps took 20s",
    ):  # fmt: skip
        assert words in text, words
    assert "train.lr" not in text and "new.a" not in text  # as by default; a key that the run did not know
    labels = [attributes.get("aria-label") for tag, attributes in page.tags if tag == "svg"]
    for label in ("training loss", "held-out loss of code", "learning rate", "tokens per second, all devices"):
        assert label in labels
    assert "Gap" not in text and "Diagnostics" not in text


def test_a_page_needs_nothing_besides_itself(tmp_path: Path) -> None:
    diagnostics = {
        "kind": "diagnostics",
        "step": 1,
        "linears": {"blocks.0.up": {"operands": {}, "gemms": {"wgrad": 0.1}}},
    }
    page = Page(write_report([write_run(tmp_path / "run", records=[diagnostics])], defaults={}))
    assert "script" not in [tag for tag, _ in page.tags] and "link" not in [tag for tag, _ in page.tags]
    assert "default-src 'none'" in page.source
    for _, attributes in page.tags:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "data"):
                assert str(value).startswith(("#", "data:image/png;base64,")), (name, value)
    assert not re.findall(r"url\((?!#)", page.source) and "@import" not in page.source
    # Names of clip paths: each once, or a figure would be cut by another one's frame.
    names = re.findall(r'<clipPath id="([^"]+)"', page.source)
    assert names and len(set(names)) == len(names)
    assert [tag for tag, _ in page.tags].count("img") == 2
    (viewport,) = [a["content"] for tag, a in page.tags if tag == "meta" and a.get("name") == "viewport"]
    assert viewport == "width=device-width, initial-scale=1"


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    runs = [f"BF16={write_run(tmp_path / 'a')}", f"NVFP4={write_run(tmp_path / 'b', gap=0.03)}"]
    with pytest.raises(ValueError, match="say where to write it"):
        write_report(runs, defaults=DEFAULTS)
    page = Page(write_report(runs, defaults=DEFAULTS, target=tmp_path / "both.html"))
    summary = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.section("Summary")))
    assert "BF16 NVFP4" in summary and "validation loss, code 3.0000 3.0300 (+1.00%)" in summary
    assert "loss above BF16 in percent" in page.section("Gap")
    assert page.section("Losses").count("<svg") == 3
    with pytest.raises(ValueError, match="two runs are called a"):
        write_report([tmp_path / "a", tmp_path / "a"], defaults=DEFAULTS, target=tmp_path / "both.html")


def test_no_gap_to_a_run_with_other_batches(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b", "c")]
    text = (runs[1] / "metrics.jsonl").read_text()
    (runs[1] / "metrics.jsonl").write_text(re.sub(r'"tokens": (\d+)', r'"tokens": \g<1>0', text))
    gap = Page(write_report(runs, defaults={}, target=tmp_path / "x.html")).section("Gap")
    assert "No gap of b: steps of a have another number of tokens." in gap and "c: training" in gap
    gap = Page(write_report([runs[0]], defaults={}, baseline=runs[1])).section("Gap")
    assert "<svg" not in gap and "No gap of a" in gap


def test_the_gap_to_the_configured_baseline(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other", gap=-0.1)
    with (run / "config.yaml").open("a") as file:
        file.write(f"logging: {{baseline: 'BF16={other}'}}\n")
    assert "loss above BF16 in percent" in Page(write_report([run], defaults=DEFAULTS)).section("Gap")
    (other / "metrics.jsonl").unlink()  # somebody has cleared it away meanwhile
    assert "No baseline: " in Page(write_report([run], defaults=DEFAULTS)).section("Gap")


def test_a_run_of_an_old_version_has_unknowns(tmp_path: Path) -> None:
    """Only what metrics.jsonl has always had."""
    steps = [{"kind": "step", "step": n, "tokens": n, "loss": 3.0} for n in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (tmp_path / "config.yaml").write_text("{not yaml")
    page = Page(write_report([tmp_path], defaults=DEFAULTS))
    text = re.sub(r"\s+", " ", page.text)
    for words in ("state unknown", "steps 3 ", "model unknown", "goodput unknown", "tokens per second unknown",
                  "Unknown: no ledger", "Unknown: no config.yaml"):  # fmt: skip
        assert words in text, words


def test_a_long_run_makes_no_huge_page(tmp_path: Path) -> None:
    steps = [
        json.dumps({"kind": "step", "step": n, "tokens": n, "loss": 3.0 + (n * 7919 % 1000) / 1e3, "lr": 1e-3,
                    "grad_norm": 1.0 + (n * 104729 % 1000) / 1e3, "step_time": 0.1}) + "\n"
        for n in range(1, 50_001)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(steps))
    assert write_report([tmp_path], defaults={}).stat().st_size < 2_000_000


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        ("none", "does not exist; name the run.dir of a run that has trained, or drop it"),
        ("empty", "has no training steps yet; name the run.dir"),
        ("=x", "names no run"),
        ("own", "is this run's own run.dir"),
        ("own=other", "has the name of this run, own; give it one of its own: NAME="),
        ("other", None),
        ("BF16=other", None),
    ],
)
def test_a_baseline_that_is_no_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, baseline: str, words: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("other", "own") if baseline == "own" else ("other",):
        write_run(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    config = Config(logging=LoggingConfig(baseline=baseline), run=RunConfig(dir="own"))
    if words is None:
        check_baseline(config)
        return
    with pytest.raises(ConfigError, match=r"^logging\.baseline=") as refused:
        check_baseline(config)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_run_that_has_begun_goes_on_without_its_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(logging=LoggingConfig(baseline="gone"), run=RunConfig(dir="own"))
    with pytest.raises(ConfigError, match=r"gone/metrics\.jsonl does not exist"):
        check_baseline(config)
    write_run(tmp_path / "own")
    for rank in ("1", "0"):
        assert not caplog.records
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        check_baseline(config)
    assert [record.getMessage() for record in caplog.records] == [
        "logging.baseline=gone is no run to compare with: gone/metrics.jsonl does not exist; this run goes on, and its "
        "pictures are without it"
    ]
