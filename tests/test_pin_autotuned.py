"""That a run fixes what its autotuned kernels use, and what a deterministic run asks of Inductor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fp4.config.schema import Config, ModelConfig, RunConfig, TrainConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.training.callbacks import kernels as autotuning
from megatron_fp4.training.callbacks.kernels import RECORD_FILE, Kernels
from models.execution import Execution
from models.hybrid import build_model
from models.mamba2 import fused_conv_silu
from models.ssd import ScanInputs, fused_scan, plain_scan

ROOT = Path(__file__).resolve().parent.parent
MODEL = ModelConfig(
    pattern="-M", hidden_dim=64, mamba_num_heads=4, mamba_head_dim=32, mamba_num_groups=2, mamba_state_dim=16
)


class Lines(list[str]):
    text = list.append


class Pinned:
    lines = ("first line", "second line")
    record = staticmethod(lambda: {"choices": ["late ones, too"]})


def run_of(mesh: ParallelMesh, folder: Path, deterministic: bool = True, scan: bool = True) -> Any:
    with torch.device("meta"):
        model = build_model(MODEL, mesh, torch.bfloat16, Execution({"scan": fused_scan} if scan else {}))
    train = TrainConfig(micro_batch_size=3, sequence_length=48)
    config = Config(run=RunConfig(dir=str(folder), deterministic=deterministic), train=train)
    phases = SimpleNamespace(spans=[SimpleNamespace(sequence_length=None)] * 2)
    kernels = Kernels(Path("/somewhere"))
    kernels.trainer = SimpleNamespace(  # type: ignore[assignment]
        config=config,
        mesh=mesh,
        model=model,
        log=SimpleNamespace(console=Lines(), active=True),
        progress=Progress(),
        data=SimpleNamespace(phases=phases),
    )
    return kernels


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def pin(rehearse: Callable[[], None], saved: Any, machine_folder: Path) -> Pinned:
        made.append((rehearse, saved, machine_folder))
        return Pinned()

    monkeypatch.setattr(autotuning, "pin_kernels", pin)
    return made


def said(run: Any, start: int, saved: Any) -> list[str]:
    run.load_state_dict(saved)
    run.trainer.log.console.clear()
    run.start(start)
    return list(run.trainer.log.console)


def test_a_run_with_autotuned_kernels(mesh: ParallelMesh, tmp_path: Path, calls: list[Any]) -> None:
    run, saved = run_of(mesh, tmp_path), {"choices": []}
    assert run.state_dict() is None and said(run, 4, saved) == ["first line", "second line"]
    ((_, given, folder),) = calls
    assert given is saved and folder == Path("/somewhere")
    (tmp_path / RECORD_FILE).unlink()
    run.on_checkpoint(2)
    assert run.state_dict() == json.loads((tmp_path / RECORD_FILE).read_text()) == {"choices": ["late ones, too"]}
    assert "does not say" in said(run_of(mesh, tmp_path), 4, None)[0]  # an older checkpoint
    assert said(run_of(mesh, tmp_path), 0, None) == ["first line", "second line"]
    calls.clear()
    run = run_of(mesh, tmp_path, scan=False)
    assert said(run, 4, None) == [] and calls == [] and run.state_dict() is None


def test_phases_of_shorter_sequences_are_rehearsed_too(mesh: ParallelMesh, tmp_path: Path, calls: list[Any]) -> None:
    run, shapes = run_of(mesh, tmp_path), []
    run.trainer.data.phases.spans += [SimpleNamespace(sequence_length=length) for length in (12, 24, 12)]
    run.trainer.model.blocks[1].mixer.rehearse = lambda rows, length, *_: shapes.append((rows, length))
    said(run, 0, None)
    calls[-1][0]()
    assert shapes == [(3, 48), (12, 12), (6, 24)]


def test_the_rehearsal_is_the_run_in_small(mesh: ParallelMesh, tmp_path: Path, calls: list[Any]) -> None:
    """Shapes and dtypes of a real step with a causal-conv1d that returns BF16, and of one that returns FP32."""
    run = run_of(mesh, tmp_path)
    mamba = run.trainer.model.blocks[1].mixer
    seen: dict[str, Any] = {}

    def scan(inputs: ScanInputs, chunk_size: int, documents_bs: torch.Tensor | None = None) -> torch.Tensor:
        seen.update({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in inputs._asdict().items()})
        return plain_scan(ScanInputs(*(tensor.float() for tensor in inputs)), chunk_size).to(inputs.x_bshp.dtype)

    generator = torch.get_rng_state()
    for fused, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        mamba._scan = scan
        if fused:
            mamba._conv = fused_conv_silu
        said(run, 0, None)
        calls[-1][0]()
        assert seen == {
            "x_bshp": ((3, 48, 4, 32), dtype),
            "dt_bsh": ((3, 48, 4), torch.bfloat16),
            "a_h": ((4,), torch.float32),
            "b_bsgn": ((3, 48, 2, 16), dtype),
            "c_bsgn": ((3, 48, 2, 16), dtype),
            "d_h": ((4,), torch.float32),
            "dt_bias_h": ((4,), torch.float32),
        }
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in mamba.parameters())


@pytest.mark.slow
def test_inductor_is_told_before_it_is_imported() -> None:
    code = (
        "import sys, os, pretrain\n"
        "from megatron_fp4.parallel.mesh import init_distributed\n"
        "init_distributed('cpu', 60)\n"
        "assert 'torch._inductor.config' not in sys.modules\n"
        "pretrain.set_determinism(True)\n"
        "import torch._inductor.config as inductor\n"
        "assert inductor.deterministic\n"
        "os._exit(0)\n"
    )
    # A run in this process, of another test, may have set it.
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_DETERMINISTIC"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
