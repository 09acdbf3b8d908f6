import json
import subprocess

import pytest

from tests.programs import Program, environments_of_ranks, run_program

pytestmark = pytest.mark.slow


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    return run_program(["scripts/benchmark.py", "--small", "--device", "cpu", "--iterations", "1", *options])


def test_one_command_writes_json_and_prints_a_table(tmp_path):
    output = tmp_path / "benchmark.json"
    done = benchmark("--warmup", "0", "--recompute", "selective", "--output", str(output))
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert report["ceilings"]["gemm_tflops"] > 0 and report["ceilings"]["copy_tb_per_s"] > 0
    assert [(row["recipe"], row["weights_kept"]) for row in report["linears"]] == [
        ("bf16", True),
        ("nvfp4", False),
        ("nvfp4", True),
    ]
    bf16, nvfp4 = report["models"]
    assert (bf16["precision"], nvfp4["precision"]) == ("bf16", "nvfp4")
    assert bf16["time_ratio"] == 1 and nvfp4["time_ratio"] == nvfp4["milliseconds"] / bf16["milliseconds"]
    assert abs(bf16["loss"] - nvfp4["loss"]) < 0.1 and bf16["recompute"] == "selective"
    assert bf16["quantized_linears"].startswith("0 of ") and not nvfp4["quantized_linears"].startswith("0 of ")
    assert any(kernel["name"] == "aten::mm" for kernel in bf16["top_kernels"])
    assert report["optimizer"]["milliseconds"] > 0
    assert "tokens/s" in done.stdout and "nvfp4" in done.stdout


def test_mistakes_are_one_line():
    for options, words in ((("--models", "7b"), "7b is not one of tiny"), (("--kernels", "fused"), "needs CUDA")):
        done = benchmark(*options)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def parallel(processes: int, *options: str) -> str:
    """What the ranks print."""
    small = ["model=tiny", "run.device=cpu", "train.sequence_length=64", "train.micro_batch_size=1"]
    command = ["scripts/benchmark_parallel.py", "--steps=1", "--warmup=1", *options, *small]
    ranks = [Program(command, environment) for environment in environments_of_ranks(processes)]
    output = "".join(rank.communicate(timeout=300)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0] * processes, output
    return output


def test_scaling_is_relative_to_another_mesh(tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    parallel(1, "--output", str(one), "train.global_batch_size=2")
    # The same global batch on two ranks: the same loss.
    printed = parallel(2, "--output", str(two), "--against", str(one), "train.global_batch_size=2")
    first, second = json.loads(one.read_text()), json.loads(two.read_text())
    assert first["losses"][0] == second["losses"][0]
    assert (second["ranks"], second["data"], second["micro_batches_per_rank"]) == (2, 2, 1)
    share = second["tokens_per_second"] / first["tokens_per_second"] / 2
    assert f"{share:.1%} of ideal" in printed


def test_a_mesh_that_cannot_be_is_one_line():
    done = run_program(["scripts/benchmark_parallel.py", "model=tiny", "run.device=cpu", "parallel.tensor=2"])
    assert done.returncode == 2 and "benchmark_parallel.py: parallel.tensor=2" in done.stderr
    assert "Traceback" not in done.stderr
