import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/benchmark.py", "--small", "--device", "cpu", "--iterations", "1", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


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


def parallel(processes: int, *options: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    small = ["model=tiny", "run.device=cpu", "train.sequence_length=64", "train.micro_batch_size=1"]
    command = [*launch, "scripts/benchmark_parallel.py", "--steps=1", "--warmup=1", *options, *small]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_scaling_is_relative_to_another_mesh(tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    done = parallel(1, "--output", str(one), "train.global_batch_size=2")
    assert done.returncode == 0, done.stderr
    # The same global batch on two ranks: the same loss.
    done = parallel(2, "--output", str(two), "--against", str(one), "train.global_batch_size=2")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(one.read_text()), json.loads(two.read_text())
    assert first["losses"][0] == second["losses"][0]
    assert (second["ranks"], second["data"], second["micro_batches_per_rank"]) == (2, 2, 1)
    share = second["tokens_per_second"] / first["tokens_per_second"] / 2
    assert f"{share:.1%} of ideal" in done.stdout


def test_a_mesh_that_cannot_be_is_one_line():
    command = [sys.executable, "scripts/benchmark_parallel.py", "model=tiny", "run.device=cpu", "parallel.tensor=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "benchmark_parallel.py: parallel.tensor=2" in done.stderr
    assert "Traceback" not in done.stderr
