"""scripts/benchmark.py: each command runs at small sizes."""

import json
from pathlib import Path

import pytest

from scripts.benchmark import main
from tests.programs import Program, environments_of_ranks
from tests.test_pretrain import SMALL

TINY = [*SMALL, "run.device=cpu", "train.micro_batch_size=1", "train.global_batch_size=2"]


def test_the_benchmark_of_linears(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "benchmark.json"
    assert main(["linear", "--shapes", "64x64x128", "--iterations", "1", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    found = [(row["recipe"], row["weights_kept"]) for row in report["linears"]]
    assert found == [("bf16", True), ("nvfp4", False), ("nvfp4", True)]
    assert all(row["milliseconds"] > 0 for row in report["linears"]) and "TFLOP/s" in capsys.readouterr().out
    assert main(["linear", "--output", str(tmp_path / "none" / "of.json")]) == 2  # before it measures
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.slow
def test_the_benchmark_of_a_mesh_compares_with_another_mesh(tmp_path: Path) -> None:
    def parallel(processes: int, *options: str) -> str:
        command = ["scripts/benchmark.py", "parallel", "--steps=1", "--warmup=1", *options, *TINY]
        ranks = [Program(command, environment) for environment in environments_of_ranks(processes)]
        printed = "".join(rank.communicate(timeout=300)[0] for rank in ranks)
        assert [rank.returncode for rank in ranks] == [0] * processes, printed
        return printed

    one, two = tmp_path / "one.json", tmp_path / "two.json"
    parallel(1, "--output", str(one))
    # Two ranks train the same global batch, so the loss is the same.
    printed = parallel(2, "--output", str(two), "--against", str(one), "--alone")
    first, second = json.loads(one.read_text()), json.loads(two.read_text())
    assert first["losses"][0] == second["losses"][0]
    assert (second["ranks"], second["data"], second["micro_batches_per_rank"]) == (2, 2, 1)
    share = second["tokens_per_second"] / first["tokens_per_second"] / 2
    assert f"{share:.1%} of ideal" in printed
    alone = second["alone_seconds"]
    assert len(alone) == 2 and f" ms, {max(alone) / second['median_seconds']:.1%} of ideal" in printed
