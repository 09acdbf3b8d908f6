"""Checkpoints on the nodes' own disks, with processes that pretend to be nodes: what a start makes of disks that are
lost and files that are damaged."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4.checkpoint import local as local_saves
from megatron_fp4.checkpoint import local_files
from megatron_fp4.checkpoint.files import RANDOM_STATE
from megatron_fp4.checkpoint.local_files import RECORD
from megatron_fp4.checkpoint.metadata import METADATA
from tests.distributed.local_jobs import Job, assert_continues, launch_all, parts

pytestmark = pytest.mark.slow


def part(base: Path, node: int, rank: int, step: int) -> Path:
    (folder,) = base.glob(f"node_{node}/megatron_fp4_*/*/rank_{rank:05d}/step_{step:08d}")
    return folder


def flip(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 4
    (folder / name).write_bytes(content)


def shards(rank: int) -> str:
    return f"__{rank}_0.distcp"


def craft(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the record, and let its digest say that it is whole."""
    record = json.loads((folder / RECORD).read_text())
    del record["sha256"]
    change(record)
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    (folder / RECORD).write_text(json.dumps({**record, "sha256": digest}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[dict[str, Any]]]:
    """Two ranks on two nodes. What they leave when they end after seven steps (a shared checkpoint of step 4, local
    ones of 6 and 7) and after eight (a shared one of 8, too), and the straight run of eight steps."""
    folder = tmp_path_factory.mktemp("made")
    jobs = [Job(folder / "straight", 8, local=False), Job(folder / "seven", 7), Job(folder / "eight", 8)]
    return folder / "seven", folder / "eight", launch_all(2, jobs)[0]


@pytest.fixture(scope="module")
def straight(made: Any) -> list[dict[str, Any]]:
    return made[2]  # type: ignore[no-any-return]


@pytest.fixture
def base(made: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "run"))


# What two ranks make of what is left


def lose(*nodes: int) -> Callable[[Path], None]:
    def change(base: Path) -> None:
        for node in nodes:
            shutil.rmtree(base / f"node_{node}")

    return change


def lose_copies(base: Path) -> None:
    """So that each part is on one node only."""
    shutil.rmtree(part(base, 0, 1, 7))
    shutil.rmtree(part(base, 1, 0, 7))


def damage(*which: tuple[int, int, int], name: str | None = None) -> Callable[[Path], None]:
    """which: node, rank and step of parts."""

    def change(base: Path) -> None:
        for node, rank, step in which:
            flip(part(base, node, rank, step), name or shards(rank))

    return change


def lose_shared(base: Path) -> None:
    shutil.rmtree(base / "checkpoints" / "step_00000004")
    (base / "checkpoints" / "latest").unlink()


def damage_everything(base: Path) -> None:
    lose_shared(base)
    damage(*((node, 1, step) for node in (0, 1) for step in (6, 7)))(base)


def lose_records_of(base: Path) -> None:
    """Half a part, as after a power cut."""
    (part(base, 0, 0, 7) / RECORD).unlink()
    (part(base, 1, 0, 7) / RECORD).unlink()


def mix(base: Path) -> None:
    """Rank 1's parts are of another save of the same step."""
    for node in (0, 1):
        craft(part(base, node, 1, 7), lambda record: record.update(save="0123456789abcdef"))


class Command:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def craft_generators(base: Path) -> None:
    folder = part(base, 1, 1, 7)
    torch.save(Command(f"touch {base / 'ran'}"), folder / RANDOM_STATE)
    content = (folder / RANDOM_STATE).read_bytes()
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    craft(folder, lambda record: record["files"].update({RANDOM_STATE: entry}))


def craft_metadata(base: Path) -> None:
    folder = part(base, 1, 1, 7)
    content = pickle.dumps(Command(f"touch {base / 'ran'}"))
    (folder / METADATA).write_bytes(content)
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    craft(folder, lambda record: record["files"].update({METADATA: entry}))


def another_run(base: Path) -> None:
    """With the same run.dir: the nodes' disks have what the one before left."""
    shutil.rmtree(base / "checkpoints")


def nothing(base: Path) -> None: ...


@dataclass(frozen=True)
class Case:
    change: Callable[[Path], None]
    start: int
    local: bool
    nodes: tuple[int, ...] | None = None
    eight: bool = False


CASES = {
    "all is there": Case(nothing, 7, True),
    "disk 1 lost": Case(lose(1), 7, True),
    "both disks lost": Case(lose(0, 1), 4, False),
    "ranks swap nodes": Case(lose_copies, 7, True, nodes=(1, 0)),
    "both on new nodes but one": Case(nothing, 7, True, nodes=(5, 1)),
    "tensors damaged": Case(damage((1, 1, 7)), 7, True),
    "record damaged": Case(damage((1, 1, 7), name=RECORD), 7, True),
    "metadata damaged": Case(damage((1, 1, 7), name=METADATA), 7, True),
    "generators damaged": Case(damage((0, 0, 7), name=RANDOM_STATE), 7, True),
    "both own copies damaged": Case(damage((0, 0, 7), (1, 1, 7)), 7, True),
    "both copies damaged": Case(damage((0, 1, 7), (1, 1, 7)), 6, True),
    "both copies of both steps damaged": Case(damage((0, 1, 7), (1, 1, 7), (0, 0, 6), (1, 0, 6)), 4, False),
    "no record": Case(lose_records_of, 6, True),
    "parts of two saves": Case(mix, 6, True),
    "no shared one": Case(lose_shared, 7, True),
    "nothing whole": Case(damage_everything, -1, False),
    "the shared one is newer": Case(nothing, 8, False, eight=True),
    "the newer shared one is damaged": Case(
        lambda base: flip(base / "checkpoints" / "step_00000008", shards(0)), 7, True, eight=True
    ),
    "crafted generators": Case(craft_generators, 7, True),
    "crafted metadata": Case(craft_metadata, 7, True),
    "crafted names": Case(
        lambda base: craft(part(base, 1, 1, 7), lambda record: record["files"].update({"../out": {"size": 1}})), 7, True
    ),
    "another run": Case(another_run, 0, False),
    "one folder for both nodes": Case(nothing, -1, False, nodes=(3, 3)),
    "a file in the place of the folder": Case(lambda base: (base / "node_7").write_text(""), -1, False, nodes=(0, 7)),
}


@pytest.fixture(scope="module")
def outcomes(made: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """Of each case, its folder and what the ranks found, on their way to step 8."""
    folder, jobs = tmp_path_factory.mktemp("cases"), []
    for number, case in enumerate(CASES.values()):
        base = Path(shutil.copytree(made[1 if case.eight else 0], folder / str(number)))
        case.change(base)
        jobs.append(Job(base, 8, nodes=case.nodes))
    # Some at a time: `launch` gives its processes a minute, and a machine may be slow.
    results = [result for first in range(0, len(jobs), 6) for result in launch_all(2, jobs[first : first + 6])]
    return {name: (job.base, result) for name, job, result in zip(CASES, jobs, results, strict=True)}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.start >= 0])
def test_a_start_takes_the_newest_that_can_be_had(name: str, outcomes: Any, straight: list[dict[str, Any]]) -> None:
    base, results = outcomes[name]
    assert_continues(results, straight, CASES[name].start, CASES[name].local)
    assert not (base / "ran").exists() and not list(base.rglob("out"))
    assert not list(base.glob("node_*/megatron_fp4_*/*/*/*.tmp")) and not list(base.glob("node_*/.probe*"))


def test_what_a_local_start_brings_back_and_how_it_goes_on(outcomes: Any) -> None:
    base, results = outcomes["all is there"]
    assert results[1]["back"] == 4  # where the run would have gone back to without a stop
    assert results[1]["trainer"] == {"note": [7, 0.1]} and results[0]["reports"] == [(8, False, None)]
    assert parts(base / "node_0") == parts(base / "node_1") == {(rank, step) for rank in (0, 1) for step in (6, 7)}


def test_a_part_comes_back_to_the_node_that_needs_it(outcomes: Any) -> None:
    base, _ = outcomes["disk 1 lost"]
    assert parts(base / "node_1") == {(1, 7)}


def test_a_damaged_shared_one_is_moved_aside(outcomes: Any) -> None:
    base, _ = outcomes["the newer shared one is damaged"]
    assert (base / "checkpoints" / "step_00000008.damaged").is_dir()


def test_what_is_of_another_run_stays(outcomes: Any) -> None:
    base, results = outcomes["another run"]
    assert len(list((base / "node_0").glob("megatron_fp4_*"))) == 2
    assert {(rank, step) for rank in (0, 1) for step in (6, 7)} == parts(base / "node_0")
    assert results[0]["reports"][-1] == (8, False, None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        # Weights were read into from damaged files: nothing to begin at step 0 with.
        (
            "nothing whole",
            "none is whole .*step 7: no node has the part of rank 1.* begin anew with checkpoint",
        ),
        ("one folder for both nodes", "is one folder that several nodes share"),
        ("a file in the place of the folder", "checkpoint.local_dir cannot be used on every node: .*rank 1: .*node_7"),
    ],
)
def test_refused(name: str, words: str, outcomes: Any) -> None:
    for result in outcomes[name][1]:
        assert re.search(words, result["refused"])


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(2, 0), (2, 1), (1, 0)], "rank 2 is number 0 of 1 on its node"),
        ([(1, 0), (2, 0), (2, 1)], "rank 1 is number 0 of 2 on its node"),
        ([(2, 0), (2, 0), (2, 1), (2, 1)], "rank 1 is number 0 of 2 on its node"),
        ([(0, 0), (0, 0)], "LOCAL_WORLD_SIZE"),
        ([(2, 0), (2, 1)], None),
        ([(0, 0)], None),
    ],
)
def test_nodes_that_are_understood(places: list[tuple[int, int]], words: str | None) -> None:
    _, problem = local_saves._per_node(places)
    assert problem is None if words is None else words in str(problem)


# Several starts


def test_each_start_has_its_folder_until_there_are_two_newer_ones(
    tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    """Also where training waits for the saves; a start in between that saved nothing changes nothing."""
    jobs = [Job(tmp_path, until, asynchronous=False) for until in (3, 3, 6, 6, 8)]
    first, idle, second, _, third = launch_all(2, jobs)
    assert first[0]["start"] == 0 and (idle[0]["start"], idle[0]["local"]) == (3, True)
    assert (second[0]["start"], second[0]["local"]) == (3, True)
    assert_continues(third, straight, 6, local=True)
    assert len(list((tmp_path / "node_0").glob("megatron_fp4_*/*"))) == 2  # the second's, and the third's
    assert parts(tmp_path / "node_0") == {(0, 6), (1, 6), (0, 7), (1, 7)}


def test_other_ranks_take_the_shared_one(base: Path, straight: list[dict[str, Any]]) -> None:
    """What was saved locally counts until they have saved something themselves."""
    ((idle,),) = launch_all(1, [Job(base, 4)])
    assert (idle["start"], idle["local"]) == (4, False)
    copy = Path(shutil.copytree(base, base.with_name("copy")))
    (first,), (second,) = launch_all(1, [Job(base, 5), Job(base, 6)])
    assert (first["start"], second["start"], second["local"]) == (4, 5, True)
    still, not_any_more = launch_all(2, [Job(copy, 8), Job(base, 8)])
    assert_continues(still, straight, 7, local=True)
    assert_continues(not_any_more, straight, 4, local=False)


def test_a_run_that_went_on_without_them_does_not_come_back_to_them(base: Path) -> None:
    (without,) = launch_all(2, [Job(base, 8, local=False)])
    assert without[0]["start"] == 4
    assert local_files.read_lineage(base / "checkpoints").starts == ()  # type: ignore[union-attr]


# Four ranks


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Two replicas of two shards: straight, on four nodes and on two nodes; then on their way to step 8 again."""
    folder = tmp_path_factory.mktemp("four")
    common = Job(folder, 7, replicate=2)
    first = [
        replace(common, base=folder / "straight", until=8, local=False),
        replace(common, base=folder / "four"),
        replace(common, base=folder / "two", per_node=2),
    ]
    straight = launch_all(4, first)[0]
    for name, nodes in (("apart", (0, 2)), ("neighbours", (1, 2))):
        lose(*nodes)(Path(shutil.copytree(folder / "four", folder / name)))
    Path(shutil.copytree(folder / "two", folder / "half"))
    lose(1)(folder / "half")
    second = [
        replace(common, base=folder / "apart", until=8),
        replace(common, base=folder / "neighbours", until=8),
        replace(common, base=folder / "half", until=8, per_node=2),
    ]
    return folder, (straight, *launch_all(4, second))


def test_neighbours_are_the_pair_that_must_not_be_lost(of_four: Any) -> None:
    straight, apart, neighbours, _ = of_four[1]
    assert_continues(apart, straight, 7, local=True)
    assert_continues(neighbours, straight, 4, local=False)


def test_two_ranks_a_node(of_four: Any) -> None:
    folder, (straight, _, _, half) = of_four
    everything = {(rank, step) for rank in range(4) for step in (6, 7)}
    assert parts(folder / "two" / "node_0") == parts(folder / "two" / "node_1") == everything
    assert parts(folder / "four" / "node_2") == {(rank, step) for rank in (1, 2) for step in (6, 7)}
    assert_continues(half, straight, 7, local=True)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/b", "..", RECORD])
def test_a_record_names_files_beside_it(made: Any, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(part(made[0], 0, 0, 7), tmp_path / "part"))
    craft(folder, lambda record: record["files"].update({name: {"size": 1, "sha256": ""}}))
    with pytest.raises(local_files.DamagedCheckpointError, match="not the name of a file beside it"):
        local_files.decode((folder / RECORD).read_bytes())
