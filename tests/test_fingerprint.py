"""scripts/fingerprint.py: its cases can run, and a line changes with every kind of bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron_fp4.checkpoint.files import FileRecord, Manifest, write_manifest
from pretrain import configure
from scripts import fingerprint

# A run in no time, which does what it is told: metrics of one step, and a checkpoint that it finds in its folder.
PROGRAM = """
import json, shutil, sys
from pathlib import Path

given = dict(argument.split("=", 1) for argument in sys.argv[1:])
if "fail" in given:
    sys.exit("it " + "fails")
run_dir = Path(given["run.dir"])
shutil.copytree(given.get("weights", "ones"), run_dir / "checkpoints" / "step_1")
(run_dir / "checkpoints" / "latest").write_text("step_1")
records = [
    {"kind": "step", "step": 1, "loss": 2.5, "grad_norm": 1.0 + float(given.get("norm", 0)), "lr": 0.1, "time": 3},
    {"kind": "validation", "step": 1, "loss": 2.0 + float(given.get("held_out", 0)), "time": hash(run_dir)},
    {"kind": "diagnostics", "step": 1, "error": float(given.get("error", 0))},
]
(run_dir / "metrics.jsonl").write_text("\\n".join(map(json.dumps, records)))
"""


def test_every_case_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (ranks, _) in fingerprint.CASES.items():
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        arguments = fingerprint.arguments_of(name, tmp_path)
        configure([*(argument for argument in arguments if "checkpoint.resume" not in argument), "run.device=cpu"])


def test_a_line_changes_with_every_kind_of_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pretrain.py").write_text(PROGRAM)
    ones = torch.ones(4)
    for name, weights in (("ones", ones), ("more", torch.nextafter(ones, 2 * ones))):
        save({"model": {"w": weights}}, storage_writer=FileSystemWriter(tmp_path / name), no_dist=True)
        contents = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        records = {file: FileRecord(len(of), hashlib.sha256(of).hexdigest()) for file, of in contents.items()}
        write_manifest(tmp_path / name, Manifest(1, 1, 0, 0, 1, {}, records, "2"))
    cases = {
        "a run": "",
        "the same": "",
        "weights": "weights=more",
        "norms": "norm=1e-15",
        "held out": "held_out=1e-15",
        "measured": "error=1e-15",
        "failing": "fail=1",
    }
    monkeypatch.setattr(fingerprint, "CASES", {name: (1, overrides) for name, overrides in cases.items()})
    monkeypatch.setattr(fingerprint, "COMMON", "common=1")
    assert fingerprint.main(["--tree", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "failing" in printed and "it fails" in printed.split("FAILED")[1]
    first, *lines = [line.split("2.5", 1) for line in printed.splitlines() if "2.5" in line]
    found = {name.strip(): dict(zip(*[iter(hashes.split())] * 2, strict=True)) for name, hashes in lines}
    whole = dict(zip(*[iter(first[1].split())] * 2, strict=True))
    differing = {name: [what for what in whole if hashes[what] != whole[what]] for name, hashes in found.items()}
    assert differing == {
        "the same": [],
        "weights": ["state"],
        "norms": ["steps"],
        "held out": ["steps"],
        "measured": ["measured"],
    }
