import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
import torch

from data import builtin
from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed, leave_distributed
from tests.composing import compose_once

compose_once()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files by the time of their slow tests, longest first. One process runs all tests of a file, so the files
    that begin last must be short."""
    slow = Counter[Path]()
    for item in items:
        if mark := item.get_closest_marker("slow"):
            slow[item.path] += mark.kwargs.get("seconds", 3)
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection, and collect less often. Otherwise it takes a tenth of the time
    of tests that compose configurations."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def away_from_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests and the programs that they start run in a temporary folder and share a temporary cache, away from the runs
    of the checkout and the user's caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())  # making its list of fonts takes seconds
        patch.setenv("XDG_CACHE_HOME", str(_shared_folder(tmp_path_factory) / "cache"))
        patch.chdir(tmp_path_factory.mktemp("working"))
        yield


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs in its own temporary folder, where relative paths, such as the default run.dir, lead."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the built-in corpus at a vocabulary of 512, made of two packages of the standard library. All
    test processes share it and must not change it."""
    folder, whole = _shared_folder(tmp_path_factory) / "corpus", builtin.collect_documents
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            builtin, "collect_documents", lambda library: [*whole(library / "asyncio"), *whole(library / "email")]
        )
        patch.setattr(builtin, "check_enough", lambda *_: None)
        builtin.open_builtin(512, folder)
    return folder


def _shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that all test processes share."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    """A mesh of one process on the CPU. Each module has its own: others run whole programs in this process."""
    yield build_mesh(ParallelConfig(), init_distributed("cpu", 60))
    leave_distributed()


@pytest.fixture(autouse=True)
def restore_process_state() -> Iterator[None]:
    """Restore what a whole run in this process changes: environment variables and deterministic algorithms."""
    environment = dict(os.environ)
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    torch.utils.deterministic.fill_uninitialized_memory = fill
