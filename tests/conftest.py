from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from assembly import CONFIGS
from data.builtin import open_builtin
from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed
from tests.composing import quick_composing

# Files that take longest, the longest first: each is run whole by one of the processes of `make test`, and what begins
# last has to be short. The others follow as they are found.
LONGEST = """
    test_pretrain precision/test_demands distributed/test_checkpoint runtime/test_endings
    distributed/test_local_checkpoint exchange/test_megatron exchange/test_megatron_foreign
    distributed/test_equality planning/test_dry_run data/test_workers distributed/test_local_saves
    test_soak test_going_on data/test_remote config/test_compose test_spikes_run exchange/test_hf test_slurm
    planning/test_backend inference/test_agreement distributed/test_checkpoint_choice data/prepare/test_resume
    training/test_cuda_graphs test_exporting_run models/test_recompute measure/test_replay
    data/tokenizers/test_kinds test_compare_repeats data/test_megatron_run distributed/test_gathered_codes
    test_initialized_run exchange/test_in_run parallel/test_mesh test_generate exchange/test_checkpoint
    exchange/test_nvfp4_folders training/test_recheck_run exchange/test_errors runtime/test_run_lock test_preflight
    distributed/test_masked_documents test_replay_command test_try_recipes test_masked_run test_recipes
    test_benchmark test_packaging data/test_builtin
"""

# Whose tests are of composing and its errors.
OF_COMPOSING = ("config", "test_configure.py", "test_refusals.py")
KNOWN: dict[Any, Any] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the longest files to the front."""
    folder = Path(__file__).parent
    places = {folder / f"{name}.py": place for place, name in enumerate(LONGEST.split())}
    assert all(path.exists() for path in places), f"gone: {[path for path in places if not path.exists()]}"
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Modules and tests stay: no collection of garbage looks at them again. And collect less often than Python does by
    itself, which costs one tenth of the time of tests that compose configurations."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def composed_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """What this process composes of the project's configurations, where a test is not of that itself."""
    if request.path.relative_to(Path(__file__).parent).parts[0] in OF_COMPOSING:
        yield
        return
    with quick_composing(CONFIGS, KNOWN):
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the built-in corpus at a vocabulary of 512, which takes some ten seconds to build: once for
    all processes that run tests. Not to be changed."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    open_builtin(512, folder / "corpus")
    return folder / "corpus"


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    """The mesh of this process alone, on the CPU; one a module, because other modules run whole programs in here."""
    yield build_mesh(ParallelConfig(), init_distributed("cpu", 60))
    dist.destroy_process_group()


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
