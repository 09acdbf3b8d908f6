"""Megatron's order of samples, against its rules and against recordings of Megatron-core: megatron_golden.json has
digests of what the `BlendedMegatronDatasetBuilder` of megatron-core 0.16.1 builds for CASES."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data import provider
from data.indexed import HEADER, MAGIC, VERSION, IndexedDataset
from data.loader import MicroBatchLoader
from data.megatron_order import MegatronSchedule, MegatronSource, blending_indices
from data.schedule import Phase
from megatron_fp4.config.schema import Config, MegatronConfig
from tests.composing import composed

GOLDEN = Path(__file__).with_name("megatron_golden.json")
VOCAB_SIZE = 60000


@dataclass(frozen=True)
class Case:
    """A Megatron run. sequences: how many each dataset has. weights: as on the command line; None: prefixes without
    weights. split: `--split`, with `--data-path`; None: `--train-data-path`."""

    name: str
    sequences: tuple[int, ...]
    seq_length: int
    num_samples: int
    seed: int
    weights: tuple[float, ...] | None = None
    split: str | None = None


CASES = [
    Case("small", (5,), 8, 12, 1234),
    Case("small_blend", (6, 4, 3), 8, 30, 1234, (0.5, 0.3, 0.2)),
    # Less than an epoch, one, many. The last epoch is shuffled apart if less than 80% of it is used.
    Case("part_of_an_epoch", (400,), 32, 100, 1),
    *(Case(f"epochs_{n}", (60,), 16, n, 7) for n in (150, 300, 336, 340, 345, 350, 360, 400, 1000, 5000)),
    Case("single_weighted", (300,), 32, 2000, 5, (1.0,), "97,3,0"),
    Case("single_per_split_weighted", (300,), 32, 2000, 5, (1.0,)),
    Case("single_split", (1003,), 32, 1500, 5, None, "949,51,0"),
    Case("split_halves", (7, 33), 8, 100, 9, (2.0, 1.0), "50,50,0"),
    Case("split_two_shares", (101,), 8, 100, 9, None, "99,1"),
    Case("lengths_as_weights", (200, 50, 120), 16, 100000, 3, None, "97,3,0"),
    Case("lengths_as_weights_capped", (200, 50, 120), 16, 250, 3, None, "97,3,0"),
    Case("per_split_lengths", (200, 50), 16, 100000, 3),
    Case("percent", (200, 300, 50), 64, 1000, 42, (30, 50, 20), "100,0,0"),
    Case("ninths", (100,) * 9, 16, 4000, 0, (1,) * 9),
    Case("uneven", (150, 20, 300, 40, 80, 10, 500), 24, 6000, 99, (0.31, 0.0015, 0.2, 0.11, 0.07, 0.002, 0.3065)),
    Case("wide", tuple(20 + 7 * i for i in range(24)), 16, 9000, 2024, tuple(1.37**i for i in range(24)), "90,10,0"),
]


def lengths_of(case: Case, dataset: int) -> np.ndarray:
    """int32 [sequences]. Some are empty, some far longer than a sample."""
    rng = np.random.RandomState([case.seed, dataset, case.sequences[dataset]])
    lengths = rng.geometric(1 / 40, case.sequences[dataset]).astype(np.int32)
    lengths[rng.rand(len(lengths)) < 0.05] = 0
    lengths[0] += 3 * case.seq_length
    return lengths


def write_pair(prefix: Path, lengths: np.ndarray, first_token: int) -> None:
    """Write a `.bin`/`.idx` pair with documents of up to three sequences. Tokens count up by 7 from first_token."""
    total = int(lengths.sum())
    Path(f"{prefix}.bin").write_bytes(((np.arange(total) * 7 + first_token) % VOCAB_SIZE).astype("<u2").tobytes())
    pointers = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))[:-1]]) * 2
    documents = np.append(np.arange(0, len(lengths), 3), len(lengths)).astype("<i8")
    header = HEADER.pack(MAGIC, VERSION, 8, len(lengths), len(documents))
    parts = [lengths.astype("<i4"), pointers.astype("<i8"), documents]
    Path(f"{prefix}.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))


def write_datasets(case: Case, folder: Path) -> list[Path]:
    """Write the case's datasets into `folder`; returns their prefixes."""
    prefixes = [folder / f"{case.name}_{dataset}" for dataset in range(len(case.sequences))]
    for dataset, prefix in enumerate(prefixes):
        write_pair(prefix, lengths_of(case, dataset), 11 + 1000 * dataset)
    return prefixes


def digest(array: np.ndarray) -> str:
    """A hash of an array's type, shape and content."""
    array = np.ascontiguousarray(array)
    return f"{array.dtype} {list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:24]}"


RECORDED: dict[str, Any] = json.loads(GOLDEN.read_text())
NAMED = {case.name: case for case in CASES}
Opened = tuple[MegatronSchedule, dict[str, MegatronSource]]


def opened(
    streams: Mapping[str, IndexedDataset],
    phases: list[Phase],
    folder: Path,
    length: int = 16,
    seed: int = 7,
    /,
    **run: Any,
) -> Opened:
    """The schedule of a run in batches of one sample, and its sources. run: settings of `data.megatron`."""
    steps = sum(phase.steps or 0 for phase in phases)
    schedule = MegatronSchedule(phases, steps, 1, length, MegatronConfig(**run))
    return schedule, schedule.open(streams, length, seed, VOCAB_SIZE, folder / "cache")


def of_case(case: Case, folder: Path) -> Opened:
    streams = {f"s{i}": IndexedDataset(prefix) for i, prefix in enumerate(write_datasets(case, folder))}
    weights = dict(zip(streams, case.weights or (1.0,) * len(streams), strict=True))
    # With --train-data-path Megatron ignores the weight of a single dataset.
    weighted = case.weights is not None and not (len(streams) == 1 and case.split is None)
    split = None if case.split is None else [float(share) for share in case.split.split(",")]
    phases = [Phase("all", blend=weights, steps=min(case.num_samples, RECORDED[case.name]["size"]))]
    run = {"split": split, "train_samples": case.num_samples, "weighted": weighted}
    return opened(streams, phases, folder, case.seq_length, case.seed, **run)


def samples_of(run: Opened) -> list[list[int]]:
    schedule, sources = run
    located = [schedule.locate(i) for i in range(schedule.num_samples)]
    return [sources[at.source].sample(at.ordinal).tokens.tolist() for at in located]


def array(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_indices_and_samples_are_those_of_megatron(case: Case, tmp_path: Path) -> None:
    golden = RECORDED[case.name]
    run = of_case(case, tmp_path)
    schedule, sources = run
    for source, expected in zip(sources.values(), golden["datasets"], strict=True):
        [folder] = source.datasets
        for name in ("document_index", "sample_index", "shuffle_index"):
            assert digest(array(folder, name)) == expected[name]
    [layout] = schedule.layouts
    assert (layout.folder is None) == ("dataset_index" not in golden)
    for name in ("dataset_index", "dataset_sample_index") if layout.folder else ():
        assert digest(array(layout.folder, name)) == golden[name]
    assert digest(np.array(samples_of(run))) == golden["samples"]


def test_a_wrong_guess_of_where_a_stretch_begins_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the worst possible guess, the order is still that of Megatron's rule."""
    weights = [0.31, 0.0015, 0.2, 0.11, 0.3785]
    w = np.array(weights) / np.sum(weights)
    w = w / np.sum(w)
    counts, expected = [0] * len(w), []
    for i in range(4000):
        lags = [float(w[d]) * max(i, 1.0) - counts[d] for d in range(len(w))]
        chosen = lags.index(max(lags))
        expected.append((chosen, counts[chosen]))
        counts[chosen] += 1
    monkeypatch.setattr(
        "data.megatron_order._approximate_counts",
        lambda w, sizes: np.stack([sizes.astype(float), *[0.0 * sizes] * (len(w) - 1)]),
    )
    datasets, samples = blending_indices(weights, 4000)
    assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == expected


@pytest.fixture
def streams(tmp_path: Path) -> dict[str, IndexedDataset]:
    rng = np.random.default_rng(3)
    for index, name in enumerate("ab"):
        write_pair(tmp_path / name, rng.integers(5, 90, 40).astype(np.int32), 5000 * index)
    return {name: IndexedDataset(tmp_path / name) for name in "ab"}


THREE = [
    Phase("first", blend={"a": 0.7, "b": 0.3}, steps=60),
    Phase("second", blend={"b": 1.0}, steps=40),
    Phase("third", blend={"b": 1, "a": 3}, steps=80),
]


def test_phases_are_megatron_runs_of_their_own(streams: dict[str, IndexedDataset], tmp_path: Path) -> None:
    def samples(*of: tuple[Phase, int], **run: Any) -> list[list[int]]:
        resized = [Phase(phase.name, blend=phase.blend, steps=steps) for phase, steps in of]
        return samples_of(opened(streams, resized, tmp_path, **run))

    first, second, third = THREE
    in_turn = (first, 60), (second, 40), (third, 80)
    whole, alone = samples(*in_turn), [samples(phase) for phase in in_turn]
    assert whole == [*alone[0], *alone[1], *alone[2]]
    # Resuming Megatron's run 20 samples into its first phase; and a last phase that is cut short.
    assert samples((first, 40), (second, 40), consumed_samples=20) == whole[20:100]
    assert samples((second, 40), (third, 80), train_samples=140) == [*alone[1], *samples((third, 100))[:80]]
    relaunched = samples(*in_turn, phases="relaunched")
    one, two, three = (samples((phase, 180)) for phase in THREE)
    assert relaunched == [*one[:60], *two[60:100], *three[100:]] != whole
    assert samples((second, 100), consumed_samples=80) == two[80:]


def test_documents_of_a_sample_are_numbered(streams: dict[str, IndexedDataset], tmp_path: Path) -> None:
    """A sample is a part of the shuffled sequences, laid end to end; each sequence has a number."""
    _, sources = opened(streams, [Phase("all", blend={"a": 1}, steps=90)], tmp_path, 64)
    source, stream = sources["a"], streams["a"]
    offsets = stream.sequence_offsets(0, 40)
    order = array(source.datasets[0], "document_index").tolist()
    laid = [(int(t), place) for place, i in enumerate(order) for t in stream.tokens(offsets[i], np.diff(offsets)[i])]
    for ordinal, sample in enumerate(array(source.datasets[0], "shuffle_index").tolist()):
        tokens, places = zip(*laid[64 * sample : 64 * sample + 65], strict=True)
        window = source.sample(ordinal, documents=True)
        assert window.tokens.tolist() == list(tokens)
        assert window.documents is not None and window.documents.dtype == np.int32
        assert window.documents.tolist() == np.unique(places, return_inverse=True)[1].tolist()


@pytest.mark.parametrize("look_back", [2, 1 << 14])
def test_ranges_and_counts_agree_with_locate(
    streams: dict[str, IndexedDataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_back: int
) -> None:
    monkeypatch.setattr("data.megatron_order._LOOK_BACK", look_back)
    schedule, _ = opened(streams, THREE, tmp_path)
    for start, end in [(7, 8), (13, 31), (31, 31), (40, 150), (0, 180)]:
        ranges = schedule.source_ranges(start, end)
        found = [(taken.phase, taken.source, k) for taken in ranges for k in range(taken.start, taken.end)]
        assert sorted(found) == sorted(map(tuple, map(schedule.locate, range(start, end))))
    assert schedule.counts(180) == {"a": 42 + 60, "b": 18 + 40 + 20}


def test_a_resume_with_other_megatron_settings_is_refused(streams: dict[str, IndexedDataset], tmp_path: Path) -> None:
    def loader(phases: list[Phase] = THREE[:2], **run: Any) -> MicroBatchLoader:
        return MicroBatchLoader(
            *opened(streams, phases, tmp_path, **{"train_samples": 200, **run}), 1, 0, 1, num_workers=0
        )

    def state_after(steps: int) -> Any:
        before = loader()
        list(before.steps(0, steps))
        return json.loads(json.dumps(before.state_dict()))

    state, again = state_after(61), loader()
    again.load_state_dict(state)
    assert again.consumed_samples == 61 and again.changes == []
    for (one,), (other,) in zip(again.steps(61, 100), loader().steps(61, 100), strict=True):
        assert torch.equal(one.tokens, other.tokens)
    # At step 60 the second phase, the only one whose indices differ, has not begun.
    loader(train_samples=300).load_state_dict(state_after(60))
    changed: dict[str, dict[str, Any]] = {
        "from sample 60 had Megatron's .* [0, 140": {"train_samples": 300},
        "split was None and is now [9.0, 1.0]": {"split": [9, 1]},
        "data.megatron.surplus was 0.005 and is now 0.01": {"surplus": 0.01},
        "now has [5, 65": {"consumed_samples": 5},
    }
    for words, run in changed.items():
        with pytest.raises(ValueError, match=words.replace("[", r"\[")):
            loader(**run).load_state_dict(state)
    with pytest.raises(ValueError, match="keep their phases and batches"):
        other = [THREE[0], Phase("second", blend={"b": 1.0}, steps=20, global_batch_size=2)]
        loader(other).load_state_dict(state)


def test_the_second_share_of_the_split_is_held_out(tmp_path: Path) -> None:
    """Sets that data.validation names replace the held-out share. Consecutive phases with the same blend are one
    Megatron run, whose batches may grow, as with --rampup-batch-size."""
    case = NAMED["single_split"]
    write_datasets(case, tmp_path)

    def configured(*more: str) -> Config:
        config = composed(
            "data=indexed", "data.order=megatron", f"data.sources={{s0: {tmp_path}/single_split_0}}",
            f"data.cache_dir={tmp_path}/cache", f"run.seed={case.seed}", "train.global_batch_size=50",
            "train.micro_batch_size=10", "model.vocab_size=60000", "data.megatron.split=[949,51,0]",
            "validation.num_samples=null", "train.steps=34", "data.num_workers=1",
            "data.phases=[{name: small, steps: 5, global_batch_size: 10, blend: {s0: 1}}, {name: big, blend: {s0: 1}}]",
            *more,
        )  # fmt: skip
        object.__setattr__(config.train, "sequence_length", case.seq_length)  # the schema demands a multiple of 16
        return config

    run = provider.open_alone(configured())
    batches = [batch for step in run.loader.steps(0, 34) for batch in step]
    rows = torch.cat([torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1) for batch in batches]).numpy()
    assert digest(rows) == RECORDED["single_split"]["samples"]
    [held_out] = run.validation
    stream = IndexedDataset(tmp_path / "single_split_0")
    begin, end = stream.sequence_offsets(0, 1003)[[952, 1003]].tolist()
    assert held_out.name == "s0" and held_out.stream.num_tokens == end - begin
    assert np.array_equal(held_out.stream.tokens(0, 5), stream.tokens(begin, 5))
    for path in tmp_path.glob("single_split_0.*"):
        shutil.copy(path, path.with_stem("copy"))
    named = configured(f"data.validation={{web: {tmp_path}/copy}}")
    assert [held_out.name for held_out in provider.open_held_out(named)[1]] == ["web"]
