"""The callback that pins the choices of autotuned kernels, and the determinism of Inductor."""

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
from megatron_fp4.training.callbacks.kernels import Kernels
from models.execution import Execution
from models.hybrid import build_model
from models.ssd import fused_scan
from tests.programs import ROOT

_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 32, "mamba_num_groups": 2, "mamba_state_dim": 16}
MODEL = ModelConfig(pattern="-M", hidden_dim=64, **_MAMBA)
LATE = {"choices": ["late ones, too"]}


class Started:
    """The callback Kernels with an imitated trainer. printed: lines that it prints. calls: arguments of `pin_kernels`:
    (rehearsal, choices in the checkpoint, folder)."""

    def __init__(self, mesh: ParallelMesh, folder: Path, monkeypatch: pytest.MonkeyPatch, scan: bool = True) -> None:
        with torch.device("meta"):
            model = build_model(MODEL, mesh, torch.bfloat16, Execution({"scan": fused_scan} if scan else {}))
        train = TrainConfig(micro_batch_size=3, sequence_length=48)
        self.printed: list[str] = []
        self.kernels, self.calls, self.spans = Kernels(Path("/somewhere")), [], [SimpleNamespace(sequence_length=None)]
        self.kernels.trainer = SimpleNamespace(  # type: ignore[assignment]
            config=Config(run=RunConfig(dir=str(folder)), train=train),
            mesh=mesh,
            model=model,
            log=SimpleNamespace(active=True, console=SimpleNamespace(text=self.printed.append)),
            progress=Progress(),
            data=SimpleNamespace(phases=SimpleNamespace(spans=self.spans)),
        )
        self.mamba: Any = model.blocks[1].mixer

        def pin(rehearse: Callable[[], None], saved: Any, machine_folder: Path) -> Any:
            self.calls.append((rehearse, saved, machine_folder))
            return ["first line", "second line"]

        monkeypatch.setattr(autotuning, "pin_kernels", pin)
        monkeypatch.setattr(autotuning, "record_here", lambda: LATE)

    def start(self, step: int = 0, saved: Any = None) -> list[str]:
        self.printed.clear()
        self.kernels.load_state_dict(saved)
        self.kernels.start(step)
        return list(self.printed)


def test_choices_are_pinned_and_recorded(mesh: ParallelMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, saved = Started(mesh, tmp_path, monkeypatch), {"choices": []}
    assert run.kernels.state_dict() is None and run.start(4, saved) == ["first line", "second line"]
    ((_, given, folder),) = run.calls
    assert given is saved and folder == Path("/somewhere")
    assert run.kernels.state_dict() == LATE
    assert "has no record" in Started(mesh, tmp_path, monkeypatch).start(4)[0]  # an older checkpoint
    without = Started(mesh, tmp_path, monkeypatch, scan=False)
    assert without.start(4) == [] and without.calls == [] and without.kernels.state_dict() is None


def test_phases_of_shorter_sequences_are_rehearsed_too(mesh: ParallelMesh, tmp_path: Path, monkeypatch) -> None:
    run, shapes = Started(mesh, tmp_path, monkeypatch), []
    run.spans += [SimpleNamespace(sequence_length=length) for length in (12, 24, 12)]
    run.mamba.rehearse = lambda rows, length, *_: shapes.append((rows, length))
    run.start()
    run.calls[-1][0]()
    assert shapes == [(3, 48), (12, 12), (6, 24)]


@pytest.mark.slow
def test_determinism_is_set_before_inductor_is_imported() -> None:
    code = (
        "import sys, os, pretrain\n"
        "assert 'torch._inductor.config' not in sys.modules\n"
        "from megatron_fp4.training.build import set_determinism\n"
        "set_determinism(True)\n"
        "import torch._inductor.config as inductor\n"
        "assert inductor.deterministic\n"
        "os._exit(0)\n"
    )
    # A run of another test in this process may have set it.
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_DETERMINISTIC"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
