"""scripts/fingerprint.py: the configurations of its cases are valid, and a hash changes with every bit."""

import hashlib
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron_fp4.checkpoint.files import FileRecord, Manifest, write_manifest
from pretrain import configure
from scripts import fingerprint
from tests.programs import ROOT, Program, environments_of_ranks

KEPT = Path(__file__).with_name("fingerprints.txt")


def this_machine() -> str:
    """What bits on a CPU depend on, besides the code."""
    cpu = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    kind = [
        re.search(rf"^{key}\s*: (.*)$", cpu, re.MULTILINE) for key in ("model name", "cpu family", "model", "stepping")
    ]
    names = [*(match[1] for match in kind if match), torch.backends.cpu.get_cpu_capability()]
    return f"{', '.join(names)}, torch {torch.__version__}"


def forked(command: list[str], cwd: Path, **_: Any) -> SimpleNamespace:
    words = [cwd / "pretrain.py", *command[command.index("pretrain.py") + 1 :]]
    environments = environments_of_ranks(2) if "torch.distributed.run" in command else [None]
    ranks = [Program(words, environment, own_modules=cwd != ROOT) for environment in environments]
    printed = "".join(rank.communicate(timeout=240)[0] for rank in ranks)
    return SimpleNamespace(returncode=max(rank.wait() for rank in ranks), stdout=printed)


# Runs in processes of a fork server, without torchrun.
FORKED = SimpleNamespace(PIPE=None, STDOUT=None, run=forked)


@pytest.mark.slow(seconds=25)
def test_short_runs_have_the_bits_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the cases, with fewer steps, fewer blocks and a smaller vocabulary, on the kind of CPU on which
    fingerprints.txt was written. After an intended change, write into that file the lines that this test prints."""
    machine, *kept = KEPT.read_text().splitlines()
    if machine != this_machine():
        pytest.skip(f"the bits are kept for {machine}, and this is {this_machine()}")
    shorter = "train.steps=4 validation.interval=2 checkpoint.interval=2 model.vocab_size=512 model.pattern=M-*- "
    shorter += f"data=indexed data.sources={{a:{tmp_path}/corpus_a}} data.validation={{c:{tmp_path}/corpus_c}} "
    shorter += "data.phases=[{name:main,blend:{a:1}}]"
    monkeypatch.setattr(fingerprint, "COMMON", f"{fingerprint.COMMON} {shorter}")
    monkeypatch.setattr(fingerprint, "subprocess", FORKED)
    fingerprint.write_corpus(tmp_path)
    names = [line[:32].rstrip() for line in kept]
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda name: fingerprint.fingerprint(name, ROOT, tmp_path), names)]
    print("\n".join(found))
    assert found == kept


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
