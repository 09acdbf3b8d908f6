"""The report page of a whole run that was resumed and lengthened, compared with another run."""

import json
import shutil
from pathlib import Path

import pytest

import pretrain
from megatron_fp4.logging.files import REPORT_FILE
from megatron_fp4.logging.run_folder import open_run, read_records
from megatron_fp4.logging.run_log import goodput_of
from megatron_fp4.runtime.revision import revision
from scripts import report
from tests.spiked_run import FAST, small_corpus, stamps
from tests.test_pretrain import SMALL


@pytest.mark.slow
def test_a_lengthened_run_and_its_page(tmp_path: Path) -> None:
    """The baseline is a copy of the run before it was lengthened."""
    run_dir, other = tmp_path / "nvfp4", tmp_path / "other"
    overrides = [*SMALL, *FAST, *small_corpus(tmp_path), "precision=bf16", f"run.dir={run_dir}"]
    overrides += ["schedule.decay_fraction=0", "schedule.warmup_fraction=0", "checkpoint.interval=4"]
    assert pretrain.main([*overrides, "train.steps=4"]) == 0 and not (run_dir / REPORT_FILE).exists()
    other.mkdir()
    shutil.copy(run_dir / "metrics.jsonl", other)
    resumed = [*overrides, "train.steps=8", "logging.report=true"]
    assert pretrain.main(resumed) == 0
    saved = json.loads((run_dir / "checkpoints" / "step_00000008" / "trainer.json").read_text())
    facts = open_run(run_dir).facts
    assert saved["commit"] == facts["commit"] == revision()
    assert facts["parameters"] > 0 and facts["quantized_flops"] == 0
    found = goodput_of(read_records(run_dir))
    assert found is not None and " in 2 starts; " in found and "start-up" in found
    assert json.loads((run_dir / "summary.json").read_text())["goodput"] == found
    assert "2 starts" in (run_dir / REPORT_FILE).read_text()
    compared = str(tmp_path / "page.html")
    assert report.main([str(run_dir), "--baseline", f"BF16={other}", "--output", compared]) == 0
    assert "loss above BF16 in percent" in Path(compared).read_text()

    transcript = (run_dir / "run.log").read_text()
    lines = [line for line in transcript.splitlines() if line[21:25] == "step"]
    assert [int(line.split()[3].split("/")[0]) for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert transcript.count("--- from step") == 2 and "Precision plan bf16" in transcript

    # A start of the finished run leaves the page unchanged.
    before = stamps(run_dir)[str(run_dir / REPORT_FILE)]
    assert pretrain.main(resumed) == 0 and stamps(run_dir)[str(run_dir / REPORT_FILE)] == before
