"""scripts/prove_backend.py on this machine: what it lists, what it notices, and its exit codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.support import BACKENDS
from scripts import prove_backend


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(prove_backend.SHAPES, "cpu", [(128, 128, 144, 2)])


@pytest.mark.slow
def test_everything_agrees_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_USE_FAST_MATH", "1")
    assert prove_backend.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("### Proof of the backends on CPU")
    assert "All that was tested agrees." in printed
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line[:1] == "|"]
    compared = {(row[0], row[1]): row for row in rows if len(row) == 7}
    for precision in ("nvfp4", "mxfp4", "fp8_block"):
        row = compared[precision, "emulated"]
        assert row[2].endswith(", 0 faults") and int(row[2].split(",")[0]) > 8 and row[3] == "yes"
        assert all(0 <= float(error) < 4e-3 for error in row[4:])
        for name in list(BACKENDS)[1:]:
            assert "not tested: " in compared[precision, name][2]
    assert "the run is on cpu" in compared["nvfp4", "transformer_engine"][2]
    assert ["NVTE_USE_FAST_MATH", "1"] in [row[:2] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "seen"),
    [
        (lambda made: made * 1.02, "fprop product: relative error 2."),
        (lambda made: made.nan_to_num(), "NaN and inf: nan in the activation disappears"),
    ],
)
def test_what_does_not_agree_is_named(spoil, seen, capsys, monkeypatch) -> None:
    gemm = EmulatedBackend.gemm

    def spoiled(self: EmulatedBackend, *arguments: Any) -> Tensor:
        return spoil(gemm(self, *arguments))

    monkeypatch.setattr(EmulatedBackend, "gemm", spoiled)
    assert prove_backend.main(["--precision", "nvfp4", "--backend", "emulated"]) == 1
    printed = capsys.readouterr().out
    assert "faults.**" in printed and "All that was tested" not in printed
    assert any(line.startswith("- emulated: nvfp4, 128 tokens") and seen in line for line in printed.splitlines())


def test_misuse(capsys) -> None:
    assert prove_backend.main(["model.hidden_dims=3"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert prove_backend.main(["model.hidden_dim=100"]) == 2
    assert prove_backend.main(["precision.bf16_blocks.names=['*.no_proj']", "--precision", "nvfp4"]) == 2
    assert "matches no linear" in capsys.readouterr().err
    for wrong in (["--precision", "fp3"], ["--backend", "cutlass"], ["--fast"]):
        with pytest.raises(SystemExit) as ended:
            prove_backend.main(wrong)
        assert ended.value.code == 2
