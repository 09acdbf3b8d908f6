"""The configurations of autotuned kernels: rank 0 chooses them once, and all ranks and later starts use them."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fp4.training.callbacks import kernels as autotuning
from megatron_fp4.training.callbacks.kernels import KeptKernels, choices_in, live_autotuners, pin_kernels, record_here
from tests.training.harness import RankFailedError, alone, launch
from tests.training.kernels import call, install

HERE = {"gpu": "H200", "triton": "3.6.0"}
SCAN, NORM = "mamba_ssm.ops.triton.ssd_combined.scan", "mamba_ssm.ops.triton.ssd_combined.norm"


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove what a test installs, and make HERE the environment."""
    names = [name for name in sys.modules if name.split(".")[0] == "mamba_ssm" or name == "triton.runtime.autotuner"]
    before = {name: sys.modules.pop(name) for name in names}
    monkeypatch.setattr(autotuning, "environment_here", lambda: HERE)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        del sys.modules[name]
    sys.modules.pop("triton.runtime.autotuner", None)
    sys.modules.update(before)


def sizes(record: dict[str, Any]) -> dict[tuple[str, tuple[Any, ...]], int]:
    return {tuning: config["BLOCK_SIZE_M"] for tuning, config in choices_in(record).items()}


def start(folder: Path, fastest: int, saved: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[str], int]:
    """Tune as a new process does; returns its record, the lines that it printed and its number of measurements."""
    kernels = install(fastest)
    with alone():
        lines = pin_kernels(lambda: call(128), saved, folder)
    return record_here(), lines, sum(kernel.benchmarks for kernel in kernels.values())


def test_a_second_run_in_a_process_tunes_as_the_first(tmp_path: Path) -> None:
    """Sizes that came late in the first run got the smallest configuration; the second run measures them."""
    kernels = install(fastest=128)
    with alone():
        pin_kernels(lambda: call(128), None, tmp_path / "first")
        call(256)
        assert {key[0]: size for (_, key), size in sizes(record_here()).items()} == {128: 128, 256: 32}
        lines = pin_kernels(lambda: (call(256), call(512)), None, tmp_path / "second")
    assert lines == ["kernels: 0 configurations known, 4 tuned, 0 s"]
    (written,) = (tmp_path / "second").iterdir()
    expected = {(name, (n,)): 128 for name in (SCAN, NORM) for n in (256, 512)}
    assert sizes(record_here()) == sizes(json.loads(written.read_text())) == expected
    call(1024)
    assert [kernel.launches[-1] for kernel in kernels.values()] == [32, 32], "late sizes are not measured"


def test_choices_of_the_checkpoint_come_before_the_machines_unless_the_gpu_differs(tmp_path: Path) -> None:
    start(tmp_path / "here", fastest=32)
    saved, _, _ = start(tmp_path / "elsewhere", fastest=64)
    resumed, _, benchmarks = start(tmp_path / "here", fastest=128, saved=saved)
    assert resumed == saved and benchmarks == 0
    other = {**saved, "environment": {"gpu": "H100", "triton": "3.5.0"}}
    resumed, lines, _ = start(tmp_path / "new", fastest=128, saved=other)
    assert set(sizes(resumed).values()) == {128} and resumed["environment"] == HERE
    assert "the checkpoint" in lines[0] and "gpu H200 instead of H100; triton 3.6.0 instead of 3.5.0" in lines[0]


def test_configurations_of_all_kernels_are_compiled_before_one_is_timed(tmp_path: Path, monkeypatch) -> None:
    """Those of known sizes are not; their kernels run, the others do not."""
    start(tmp_path, fastest=64)
    kernels, passes, held = install(fastest=32), list[Any](), list[Any]()

    def rehearse() -> None:
        call(128)
        call(256)
        passes.append([(list(kernel.compiled), kernel.launches[:], kernel.benchmarks) for kernel in kernels.values()])
        held.extend(autotuner.nargs for autotuner in live_autotuners().values())

    with monkeypatch.context() as patch, alone():
        mode = SimpleNamespace(AsyncCompileMode=lambda executor, ignore_errors: nullcontext())
        patch.setitem(sys.modules, "triton", mode)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "device", nullcontext)
        patch.setattr(os, "sched_getaffinity", lambda process: range(8))
        lines = pin_kernels(rehearse, None, tmp_path)
    assert lines == ["kernels: 2 configurations known, 2 tuned, 0 s"]
    assert passes == [[([64, 32, 128], [64], 0)] * 2, [([64, 32, 128], [64, 64, 32], 3)] * 2]
    assert held == [None] * 4, "no tensor stays in memory"
    loaded_by = [kernel.loaded_by for kernel in kernels.values()]
    assert loaded_by == [[threads[0]] * 3 for threads in loaded_by], "one thread loads a kernel"
    call(512)
    assert [kernel.launches[-1] for kernel in kernels.values()] == [32, 32], "nothing is left in place"


class FileCacheManager:
    """The part of Triton 3.6's class that `KeptKernels` uses. machine: its folder."""

    machine: Path

    def __init__(self, key: str) -> None:
        self.key, self.folder = key, self.machine / key
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes, filename: str) -> str:
        (self.folder / filename).write_bytes(data)
        return str(self.folder / filename)

    def put_group(self, filename: str, group: dict[str, str]) -> None:
        self.put(json.dumps(group).encode(), f"__grp__{filename}")

    def get_group(self, filename: str) -> dict[str, str] | None:
        path = self.folder / f"__grp__{filename}"
        return json.loads(path.read_text()) if path.exists() else None


def test_another_machine_takes_compiled_kernels_from_the_run(tmp_path: Path, monkeypatch, caplog) -> None:
    """Only code for the GPU; those that the first rank compiled or found, and none that are damaged."""
    cache: Any = ModuleType("triton.runtime.cache")
    cache.FileCacheManager, cache.knobs = FileCacheManager, SimpleNamespace(cache=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", cache)
    files = {"k.json": b"{}", "k.cubin": b"code" * 99, "k.so": b"host", "k.ptx": b"text"}

    def on(machine: str, key: str, writes: bool = False, compiles: bool = False) -> dict[str, bytes] | None:
        monkeypatch.setattr(FileCacheManager, "machine", tmp_path / machine, raising=False)
        kept = KeptKernels(tmp_path / "run")
        kept.writes = writes
        kept.install()
        manager = cache.knobs.cache.manager_class(key)
        if compiles:
            manager.put_group("k.json", {name: manager.put(content, name) for name, content in files.items()})
        group = manager.get_group("k.json")
        return group and {name: Path(path).read_bytes() for name, path in group.items()}

    assert on("first", "A", compiles=True) == files and not (tmp_path / "run").exists()
    assert on("first", "A", writes=True) == on("first", "B", writes=True, compiles=True) == files
    for key in "AB":
        for _ in range(2):  # from the run, and then from the machine
            assert on("second", key) == {name: files[name] for name in ("k.json", "k.cubin")}
    kept = tmp_path / "run" / "A.zip"
    kept.write_bytes(kept.read_bytes().replace(files["k.json"], b"[]"))
    assert on("third", "A") is None and on("third", "C") is None and on("third", "B") is not None
    full = KeptKernels(kept / "folder")
    for full.writes in (True, True):  # the callback sets it twice
        full.add("A", {})
    assert caplog.text.count("compiled kernels are not kept") == 1


def _ranks(
    rank: int, folder: str, fastest: list[int], sizes_there: list[tuple[int, ...]], saved: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Start on several ranks whose measurements differ. saved: the choices in the checkpoint that they resume from."""
    autotuning.environment_here = lambda: HERE  # type: ignore[assignment]
    kernels = install(fastest[rank], sizes_there[rank])
    pin_kernels(lambda: call(128), saved, Path(folder))
    call(128)
    call(256)
    return {
        "record": record_here(),
        "launches": {name: kernel.launches[-2:] for name, kernel in kernels.items()},
        "hooked": kernels["scan"].hooked[-2:],  # configurations keep their hooks
        "benchmarks": sum(kernel.benchmarks for kernel in kernels.values()),
    }


ALL = (64, 32, 128)


def test_a_rank_with_other_kernels_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 has other kernels than the first rank: .*BLOCK_SIZE_M.: 64"):
        launch(_ranks, 2, str(tmp_path), [64, 32], [ALL, (32, 128)])


def test_the_first_rank_decides_and_a_resume_takes_its_choices(tmp_path: Path) -> None:
    """This includes late sizes. The resume is on a machine without choices where other configurations are fastest."""
    first = launch(_ranks, 2, str(tmp_path / "machine"), [64, 128], [ALL, ALL])
    assert first[0]["record"] == first[1]["record"]
    assert first[0]["launches"] == first[1]["launches"] == {"scan": [64, 32], "norm": [64, 32]}
    assert first[0]["hooked"] == first[1]["hooked"] == [128, 256]
    # For the late size, its only configuration is measured; for the other one, rank 0 measured three.
    assert (first[0]["benchmarks"], first[1]["benchmarks"]) == (8, 2)
    saved = json.loads(json.dumps(first[0]["record"]))
    again = launch(_ranks, 2, str(tmp_path / "another machine"), [128, 32], [ALL, ALL], saved)
    assert again == [{**rank, "benchmarks": 0} for rank in first]
    assert not (tmp_path / "another machine").exists()
