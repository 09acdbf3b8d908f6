"""scripts/fingerprint.py: the configurations of its cases are valid, and a hash changes with every bit."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron_fp4.checkpoint.files import FileRecord, Manifest, write_manifest
from pretrain import configure
from scripts import fingerprint


def test_every_case_is_a_valid_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (ranks, _) in fingerprint.CASES.items():
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        arguments = fingerprint.arguments_of(name, tmp_path)
        configure([*(argument for argument in arguments if "checkpoint.resume" not in argument), "run.device=cpu"])


def test_a_hash_changes_with_every_bit(tmp_path: Path) -> None:
    ones, found = torch.ones(4), []
    for name, weights in (("ones", ones), ("again", ones), ("more", torch.nextafter(ones, 2 * ones))):
        save({"model": {"w": weights}}, storage_writer=FileSystemWriter(tmp_path / name), no_dist=True)
        contents = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        records = {file: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for file, data in contents.items()}
        write_manifest(tmp_path / name, Manifest(1, 1, 0, 0, 1, {}, records, "2"))
        found.append(fingerprint.state_digest(tmp_path / name))
    assert found[0] == found[1] != found[2]
    assert fingerprint.digest([1.0]) != fingerprint.digest([1.0 + 2**-52])
