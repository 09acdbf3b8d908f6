"""scripts/prove_backend.py on a CPU: what it lists, which faults it finds, and its exit codes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fp4.precision.emulated import EmulatedBackend
from megatron_fp4.precision.support import BACKENDS
from megatron_fp4.runtime.revision import revision
from scripts import prove_backend
from tests.precision import te_stand_in
from tests.precision.reference import NVFP4
from tests.programs import cells, run_program
from tests.test_benchmark import TINY

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(prove_backend.SHAPES, "cpu", [(128, 128, 144, 2)])


@pytest.mark.slow
def test_all_cases_agree_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_USE_FAST_MATH", "1")
    assert prove_backend.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("### Proof of the backends on CPU")
    assert "All that was tested agrees." in printed
    rows = cells(printed)
    compared = {(row[0], row[1]): row for row in rows if len(row) > 2}
    assert not {name for _, name in compared} & set(list(BACKENDS)[1:])
    for precision in prove_backend.PRECISIONS:
        row, operands = compared[precision, "emulated"], 8 if "fp4" in precision else 6
        assert row[2].endswith(", 0 faults") and int(row[2].split(",")[0]) > 8
        assert row[3:5] == [f"{operands} of {operands}", "yes"]
        assert all(0 <= float(error) < 4e-3 for error in row[5:8])
    assert compared["nvfp4", "emulated"][8].startswith("0.0%, 0.0%, 0.0%, ")  # short sums are exact in any order
    assert next(row for row in rows if row[0].startswith("NVFP4, emulated"))[-1] == "yes"
    (line,) = (line for line in printed.splitlines() if "by transformer_engine: " in line and "is on cpu" in line)
    assert line.startswith("- not run: nvfp4, nvfp4_4over6_1x16,") and "by torch: " in printed
    assert ["NVTE_USE_FAST_MATH", "1"] in [row[:2] for row in rows]


@pytest.mark.slow
def test_the_page_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can run is measured, the rest is listed with the reason."""

    def backend_for(config: Any, name: str, device_type: str) -> Any:
        formats = config.precision.fprop.weight.format, name
        possible = formats[0] in ("bf16", "nvfp4") or name == "emulated"
        return BACKENDS[name]() if possible else f"{' by '.join(formats)} needs a Blackwell"

    monkeypatch.setattr(prove_backend, "LINEAR", (128, 128, 144, 2))
    monkeypatch.setattr(prove_backend, "MODEL", TINY)
    monkeypatch.setattr(prove_backend, "backend_for", backend_for)
    by_fork_server = SimpleNamespace(run=lambda command, **_: run_program(command[1:]))
    monkeypatch.setattr(prove_backend, "subprocess", by_fork_server)
    with te_stand_in.installed():
        page = prove_backend.measured(["emulated", "transformer_engine"], CPU)
    rows = cells(page)
    found = [row for row in rows if row[0] in {*prove_backend.FORMATS, *prove_backend.QUANTIZERS}]
    times, steps, graphs = (
        {(label, backend): cells for label, backend, *cells in part} for part in (found[:5], found[5:6], found[6:])
    )
    te = "transformer_engine"
    left_out = [line for line in page.splitlines() if line.startswith("- not run: ")]
    assert all(float(cell) > 0 for label in ("nvfp4", *prove_backend.QUANTIZERS) for cell in times[label, te])
    assert len(times["bf16", "emulated"]) == len(times["nvfp4", te]) == 7
    assert left_out.count(f"- not run: mxfp8 by {te}: mxfp8 by {te} needs a Blackwell") == 3
    assert float(steps["bf16", "emulated"][0]) > 0 and len(steps) == 1
    assert any(line.startswith(f"- not run: nvfp4 by {te}: ") and "a CUDA device" in line for line in left_out)
    assert graphs["nvfp4", te][0].startswith("no: ") and len(graphs) == 2


@pytest.mark.slow
def test_differences_are_reported(capsys, monkeypatch, tmp_path) -> None:
    gemm, seen = EmulatedBackend.gemm, "fprop product: relative error 2."
    monkeypatch.setattr(EmulatedBackend, "gemm", lambda *arguments: gemm(*arguments) * 1.02)
    page = tmp_path / "page.md"
    assert prove_backend.main(["--precision", "nvfp4", "--backend", "emulated", "--page", str(page)]) == 1
    printed = capsys.readouterr().out
    assert page.read_text() == printed
    assert "not run: there is no CUDA device" in printed and ["commit", revision()] in cells(printed)
    assert "faults.**" in printed and "All that was tested" not in printed
    assert any(line.startswith("- emulated: nvfp4, 128 tokens") and seen in line for line in printed.splitlines())


@pytest.mark.slow
def test_codes_that_differ_from_the_cpus_are_reported(capsys, monkeypatch) -> None:
    class OtherOnTheCPU(EmulatedBackend):
        def operands(self, *arguments: Any) -> Any:
            make_stored, make_across = super().operands(*arguments)
            return make_stored, make_across and (lambda: replace(made := make_across(), values=made.values * 2))

    monkeypatch.setattr(prove_backend, "EMULATED", OtherOnTheCPU())
    assert prove_backend.main(["--precision", "nvfp4", "--backend", "emulated"]) == 1
    printed = capsys.readouterr().out
    assert "**4 faults.**" in printed and "codes as on a CPU: values differ in" in printed and "4 of 8" in printed


def test_a_quantizer_that_raises_is_a_fault(monkeypatch) -> None:
    monkeypatch.setattr(EmulatedBackend, "operands", lambda *_: 1 / 0)
    (found,) = prove_backend.compare_with_cpu(EmulatedBackend(), NVFP4, CPU)
    assert found.fault == "failed: ZeroDivisionError: division by zero"


def test_wrong_overrides_are_refused(capsys) -> None:
    assert prove_backend.main(["model.hidden_dims=3"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert prove_backend.main(["model.hidden_dim=100"]) == 2
    assert prove_backend.main(["--page", "/none/page.md"]) == 2
    assert "there is no folder /none" in capsys.readouterr().err
    assert prove_backend.main(["precision.bf16_blocks.names=['*.no_proj']", "--precision", "nvfp4"]) == 2
    assert "matches no linear" in capsys.readouterr().err
