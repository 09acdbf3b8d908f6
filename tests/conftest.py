from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from data.builtin import open_builtin
from megatron_fp4.config.schema import ParallelConfig
from megatron_fp4.parallel.mesh import ParallelMesh, build_mesh, init_distributed

# Files that take longest, the longest first: each is run whole by one of the processes of `make test`, and what begins
# last has to be short. The others follow as they are found.
LONGEST = """
    precision/test_demands faults/test_endings test_pretrain distributed/test_checkpoint distributed/test_equality
    test_soak distributed/test_local_checkpoint exchange/test_megatron test_going_on exchange/test_hf
    test_compare_repeats test_spikes_run measure/test_replay distributed/test_gathered_codes exchange/test_in_run
    inference/test_agreement distributed/test_local_saves data/test_workers exchange/test_nvfp4_folders
    training/test_recheck_run test_benchmark test_initialized_run distributed/test_linear_codes
    measure/test_diagnostics_run data/prepare/test_resume distributed/test_generation test_generate
    test_replay_command test_compare_memory faults/test_run_lock test_packaging training/test_cuda_graphs
    test_refusals
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the longest files to the front."""
    folder = Path(__file__).parent
    places = {folder / f"{name}.py": place for place, name in enumerate(LONGEST.split())}
    assert all(path.exists() for path in places), f"gone: {[path for path in places if not path.exists()]}"
    items.sort(key=lambda item: places.get(item.path, len(places)))


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
