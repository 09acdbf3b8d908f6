"""Checkpoints on the nodes' own disks, with processes that pretend to be nodes: disks lost, kills, damage."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.checkpoint import local as local_saves
from megatron_fp4.checkpoint import local_files, transfer
from megatron_fp4.checkpoint.checkpointer import Checkpointer, CheckpointError
from megatron_fp4.checkpoint.local_files import RECORD
from megatron_fp4.checkpoint.metadata import METADATA
from megatron_fp4.checkpoint.saves import RANDOM_STATE
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.training.optimizer import optimizer_state
from megatron_fp4.training.step import train_step
from tests.training.harness import launch, toy, toy_batches, toy_mesh, whole

pytestmark = pytest.mark.slow
SHARED = 4


@dataclass(frozen=True)
class Job:
    """A start: up to step `until`, with a shared checkpoint every 4 steps and a local one after every other step.

    nodes: of each rank, the node it is on; by default each has its own. after: training goes on without a last save,
    as if all were killed.
    """

    base: Path
    until: int
    nodes: tuple[int, ...] | None = None
    per_node: int = 1
    asynchronous: bool = True
    local: bool = True
    replicate: int = 1
    resume: str = "auto"
    sabotage: str | None = None
    victims: tuple[int, ...] = ()


def run(rank: int, job: Job) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = str(job.per_node), str(rank % job.per_node)
    node = rank // job.per_node if job.nodes is None else job.nodes[rank]
    mesh = toy_mesh(replicate=job.replicate)
    model, optimizer = toy(mesh, seed=3)
    clock = RunClock(seed=0)
    checkpointer = Checkpointer(
        job.base / "checkpoints", mesh, keep=0, identity={"run": 1}, asynchronous=job.asynchronous,
        local_dir=job.base / f"node_{node}" if job.local else None, num_steps=100,
    )  # fmt: skip
    resumed = checkpointer.resume(job.resume, model, optimizer, clock, allow_mismatch=False)
    checkpointer.prepare(model, optimizer)
    start, back = 0 if resumed is None else resumed.step, checkpointer.last_step()
    losses, draws, reports = [], [], []
    for step in range(start, job.until):
        batches = toy_batches(step, mesh)
        result = train_step(model, optimizer, batches, mesh, clock, step=step, lr=1e-2, clip_norm=1.0)
        losses.append((result.loss, result.grad_norm))
        draws += [random.random(), torch.rand(()).item()]
        done = step + 1
        if job.sabotage is not None and done == job.until:
            checkpointer.finish()
            if rank in job.victims:
                SABOTAGE[job.sabotage]()
        if done % SHARED == 0 or job.local:
            checkpointer.save(
                done, model, optimizer, {"note": [done, 0.1]},
                consumed_samples=8 * done, consumed_tokens=64 * done, local=done % SHARED != 0,
            )  # fmt: skip
    checkpointer.finish()
    reports += checkpointer.reports()
    state = {**model.state_dict(), **optimizer_state(model, optimizer)}
    return {
        "start": start,
        "back": back,
        "local": resumed is not None and resumed.local,
        "trainer": None if resumed is None else resumed.trainer,
        "losses": losses,
        "draws": draws,
        "reports": [(report.step, report.local, report.error) for report in reports],
        "final": {name: whole(value) for name, value in state.items()},
    }


def run_all(rank: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """One start after the other; of those that are refused, the words."""
    results = []
    for job in jobs:
        try:
            results.append(run(rank, job))
        except (ValueError, CheckpointError) as error:
            results.append({"refused": str(error)})
    return results


def launch_all(world_size: int, jobs: list[Job]) -> list[list[dict[str, Any]]]:
    """Of each job, the results of all ranks."""
    return [list(of_job) for of_job in zip(*launch(run_all, world_size, jobs), strict=True)]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_continues(resumed: list[dict[str, Any]], straight: list[dict[str, Any]], start: int, local: bool) -> None:
    assert [(one["start"], one["local"]) for one in resumed] == [(start, local)] * len(resumed)
    for one, other in zip(resumed, straight, strict=True):
        assert one["losses"] == other["losses"][start:]
        assert one["draws"] == other["draws"][2 * start :]
        assert equal(one["final"], other["final"])


def parts(node: Path) -> set[tuple[int, int]]:
    """(rank, step) of the folders on a node, whatever the start."""
    names = [(path.parent.name, path.name) for path in node.glob("megatron_fp4_*/*/*/step_*")]
    return {(int(rank.removeprefix("rank_")), int(step.removeprefix("step_"))) for rank, step in names}


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


# Kills


def _kill(*unused: Any, **unused_too: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str, calls: int = 1) -> Callable[[], None]:
    """Kill this process when it comes to `owner.name` for that many times."""

    def sabotage() -> None:
        original, count = getattr(owner, name), iter(range(1, 100))
        setattr(owner, name, lambda *args, **kw: _kill() if next(count) == calls else original(*args, **kw))

    return sabotage


SABOTAGE = {
    "write": _before(local_saves, "write_shards"),
    "record": _before(local_files, "encode"),
    "receive": _before(transfer.Incoming, "finish"),
    "rename": _before(local_files, "publish"),
    "second rename": _before(local_files, "publish", calls=2),
    "prune": _before(local_files, "prune"),
}


# Who is killed, and from which steps the next start may go on: whether the others still heard that all had written is
# a matter of time.
KILLS = {
    ("write", (1,), True): {6},
    ("record", (0,), False): {6},
    ("receive", (1,), True): {6},
    ("rename", (0, 1), True): {6},
    ("rename", (1,), False): {6, 7},
    ("second rename", (0, 1), True): {6, 7},
    ("prune", (0, 1), True): {7},
}


@pytest.fixture(scope="module")
def killed(made: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[list[int], list[dict[str, Any]]]]:
    """Of each kill in the local save of step 7: the exit codes, and the start that follows."""
    folder, codes = tmp_path_factory.mktemp("killed"), []
    jobs = [
        Job(folder / str(number), 7, asynchronous=asynchronous, sabotage=stage, victims=victims)
        for number, (stage, victims, asynchronous) in enumerate(KILLS)
    ]
    for job in jobs:
        shutil.copytree(made[0], job.base)
        for path in list(job.base.glob("node_*/megatron_fp4_*/*/*/step_00000007")):
            shutil.rmtree(path)
        codes.append([])
        launch(run, 2, job, exit_codes=codes[-1])
    after = launch_all(2, [Job(job.base, 8) for job in jobs])
    return dict(zip(KILLS, zip(codes, after, strict=True), strict=True))


@pytest.mark.parametrize("kill", KILLS)
def test_killed_while_saving(kill: Any, killed: Any, straight: list[dict[str, Any]]) -> None:
    exit_codes, results = killed[kill]
    assert -signal.SIGKILL in exit_codes and 0 not in exit_codes
    assert results[0]["start"] in KILLS[kill]
    assert_continues(results, straight, results[0]["start"], local=True)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/b", "..", RECORD])
def test_a_record_names_files_beside_it(made: Any, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(part(made[0], 0, 0, 7), tmp_path / "part"))
    craft(folder, lambda record: record["files"].update({name: {"size": 1, "sha256": ""}}))
    with pytest.raises(local_files.DamagedCheckpointError, match="not the name of a file beside it"):
        local_files.decode((folder / RECORD).read_bytes())


# Saves that fail


@contextmanager
def _failing(stage: str) -> Iterator[None]:
    owner, name = {"write": (local_saves, "write_shards"), "receive": (transfer.Incoming, "_store")}[stage]
    original = getattr(owner, name)

    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device", "part")

    def full_later(*arguments: Any) -> Any:
        yield next(original(*arguments))
        full()

    setattr(owner, name, full if stage == "write" else full_later)
    yield
    setattr(owner, name, original)


def _fail_and_go_on(rank: int, jobs: dict[str, Job]) -> dict[str, Any]:
    """Rank 1's local saves fail for five steps, then they do not."""
    results = {}
    for stage, job in jobs.items():
        with _failing(stage) if rank == 1 else nullcontext():
            first = run(rank, job)
        torch.distributed.barrier()
        results[stage] = first["reports"], run(rank, replace(job, until=job.until + 2))
    return results


def test_a_failing_local_save_ends_nothing(tmp_path: Path) -> None:
    jobs = {stage: Job(tmp_path / stage, 5) for stage in ("write", "receive")}
    for results in launch(_fail_and_go_on, 2, jobs):
        for stage, (reports, later) in results.items():
            assert [(step, local, error is None) for step, local, error in reports] == [
                (1, True, False), (2, True, False), (3, True, False), (4, False, True), (5, True, False),
            ], stage  # fmt: skip
            assert "rank 1: [Errno 28] No space left on device" in reports[0][2]
            assert (later["start"], later["local"]) == (4, False)
            assert later["reports"] == [(5, True, None), (6, True, None), (7, True, None)]
    assert parts(tmp_path / "write" / "node_0") == {(0, 6), (1, 6), (0, 7), (1, 7)}


def _full(rank: int, job: Job) -> Any:
    """The disk is full on node 1."""
    if rank == 1:
        local_saves.shutil.disk_usage = lambda _: namedtuple("usage", "free")(10)  # type: ignore[attr-defined]
    return run(rank, job)


def test_space_is_looked_at_before(tmp_path: Path) -> None:
    for result in launch(_full, 2, Job(tmp_path, 1, asynchronous=False)):
        ((_, _, error),) = result["reports"]
        assert "rank 1: [Errno 28] a local checkpoint needs 0.00 GB on each node, and 0.00 GB are free" in error
    assert not parts(tmp_path / "node_0") and not list(tmp_path.glob("node_*/**/*.distcp"))
