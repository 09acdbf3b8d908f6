from __future__ import annotations

import copy
import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

from data import builtin
from megatron_fp4.config import compose
from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed, leave_distributed
from tests.composing import CONFIGS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have most slow tests: one process runs a file whole, and the last to begin has to be
    short."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """Modules and tests stay: no collection of garbage looks at them again. And collect less often than Python does by
    itself, which costs one tenth of the time of tests that compose configurations."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def away_from_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests, and the programs that they start, find neither the runs of the checkout nor the caches of the user: they
    run in a folder of their own and share a cache that ends with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())  # its list of fonts takes seconds to make
        patch.setenv("XDG_CACHE_HOME", str(_shared_folder(tmp_path_factory) / "cache"))
        patch.chdir(tmp_path_factory.mktemp("working"))
        yield


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths of a test, such as the default run.dir, lie in its own temporary folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def composed_quickly() -> Iterator[None]:
    """Hydra reads the project's files once for each choice of groups."""
    real, known = compose._compose, dict[Any, Any]()

    def quick(name: str, groups: list[str], folders: list[Path]) -> Any:
        if folders != [CONFIGS]:
            return real(name, groups, folders)
        if (key := (name, *groups)) not in known:
            known[key] = real(name, groups, folders)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_compose", quick)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the built-in corpus at a vocabulary of 512, of two packages of the standard library rather
    than of all: once for all processes that run tests. Not to be changed."""
    folder, whole = _shared_folder(tmp_path_factory) / "corpus", builtin.collect_documents
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            builtin, "collect_documents", lambda library: [*whole(library / "asyncio"), *whole(library / "email")]
        )
        patch.setattr(builtin, "check_enough", lambda *_: None)
        builtin.open_builtin(512, folder)
    return folder


def _shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Of all processes that run these tests."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    """The mesh of this process alone, on the CPU; one a module, because other modules run whole programs in here."""
    yield build_mesh(ParallelConfig(), init_distributed("cpu", 60))
    leave_distributed()


@pytest.fixture(scope="module")
def no_groups_left() -> Iterator[None]:
    """Nothing of a module's process groups is garbage afterwards: a forked loader worker that collects one waits for
    threads that it does not have."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a whole run in this process sets for its own end: environment variables, deterministic algorithms."""
    environment = dict(os.environ)
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    torch.utils.deterministic.fill_uninitialized_memory = fill
