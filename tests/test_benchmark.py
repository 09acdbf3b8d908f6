import json
import subprocess
import sys
from pathlib import Path

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
    assert report["optimizers"][0]["milliseconds"] > 0 and report["optimizers"][1]["milliseconds"] is None
    assert "tokens/s" in done.stdout and "nvfp4" in done.stdout


def test_mistakes_are_one_line():
    for options, words in ((("--models", "7b"), "7b is not one of tiny"), (("--kernels", "fused"), "needs CUDA")):
        done = benchmark(*options)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
