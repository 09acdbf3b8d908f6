"""Against what Megatron-core itself recorded (make_megatron_golden.py), and against its rules written out by hand."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.indexed import IndexedDataset
from data.megatron_indices import DatasetIndices, blending_indices, split_range
from data.megatron_order import MegatronOrder, MegatronRun, lay_out, order_differences
from tests.data.megatron_cases import CASES, VOCAB_SIZE, Case, digest, write_datasets, write_pair

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("megatron_golden.json").read_text())


def order_of(case: Case, folder: Path, **changes: Any) -> MegatronOrder:
    """The whole run of a case. changes: of the MegatronRun."""
    streams = {f"s{i}": IndexedDataset(prefix) for i, prefix in enumerate(write_datasets(case, folder))}
    weights = case.weights or (1.0,) * len(streams)
    # With --train-data-path Megatron takes no notice of the weight of a single dataset.
    weighted = case.weights is not None and not (len(streams) == 1 and case.split is None)
    size = min(case.num_samples, GOLDEN[case.name]["size"])
    split = None if case.split is None else [float(share) for share in case.split.split(",")]
    run = MegatronRun(split=split, train_samples=case.num_samples, weighted=weighted, **changes)
    spans = [(0, size - run.consumed_samples, dict(zip(streams, weights, strict=True)))]
    return MegatronOrder(lay_out(spans, run), streams, run, case.seq_length, case.seed, VOCAB_SIZE, folder / "cache")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_megatron_has_it(case: Case, tmp_path: Path) -> None:
    golden = GOLDEN[case.name]
    order = order_of(case, tmp_path)
    for source, expected in zip(order.sources.values(), golden["datasets"], strict=True):
        [stored] = source._stored
        found = {name: digest(np.asarray(index)) for name, index in stored.indices._asdict().items()}
        assert found == {name: expected[name] for name in DatasetIndices._fields}
        for name, array in expected.get("arrays", {}).items():
            assert getattr(stored.indices, name).tolist() == array
    [blend] = order._blends
    assert (blend is None) == ("dataset_index" not in golden)
    if blend is not None:
        assert [digest(np.asarray(array)) for array in blend.arrays] == [
            golden["dataset_index"],
            golden["dataset_sample_index"],
        ]
    places = [order.locate(i) for i in range(order.layouts[-1].end)]
    samples = np.stack([order.sources[name].sample(ordinal) for name, ordinal in places])
    assert digest(samples) == golden["samples"]
    assert samples[: len(golden.get("first_samples", []))].tolist() == golden.get("first_samples", [])


def by_hand(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    """The rule, sample by sample."""
    w = np.array(weights) / np.sum(weights)
    w = w / np.sum(w)
    counts = [0] * len(w)
    datasets, samples = [], []
    for i in range(size):
        errors = [float(w[d]) * max(i, 1.0) - counts[d] for d in range(len(w))]
        chosen = errors.index(max(errors))
        datasets.append(chosen)
        samples.append(counts[chosen])
        counts[chosen] += 1
    return datasets, samples


def test_stretches_that_began_wrong_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However bad the guess of where a stretch begins."""
    weights = [0.31, 0.0015, 0.2, 0.11, 0.3785]
    expected = by_hand(weights, 4000)
    monkeypatch.setattr(
        "data.megatron_indices._about", lambda w, sizes: np.stack([sizes.astype(float), *[0.0 * sizes] * (len(w) - 1)])
    )
    datasets, samples = blending_indices(weights, 4000)
    assert (datasets.tolist(), samples.tolist()) == expected


@pytest.mark.parametrize(
    ("split", "shares"),
    [
        (None, [(0, 1000), (1000, 1000), (1000, 1000)]),
        ([969, 30, 1], [(0, 969), (969, 999), (999, 1000)]),
        ([99, 1], [(0, 990), (990, 1000), (1000, 1000)]),
        ([1], [(0, 1000), (1000, 1000), (1000, 1000)]),
        ([0.9, 0.1, 0], [(0, 900), (900, 1000), (1000, 1000)]),
    ],
)
def test_splits(split: list[float] | None, shares: list[tuple[int, int]]) -> None:
    assert [split_range(split, share, 1000) for share in range(3)] == shares


@pytest.mark.parametrize("name", ["uneven", "epochs_360"])
def test_a_run_is_taken_up_in_the_middle(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    whole, rest = order_of(case, tmp_path), order_of(case, tmp_path, consumed_samples=100)
    assert rest.layouts[0][:4] == (0, case.num_samples - 100, 100, case.num_samples)
    assert [rest.locate(i) for i in range(case.num_samples - 100)] == [
        whole.locate(i) for i in range(100, case.num_samples)
    ]


def streams_of(tmp_path: Path) -> dict[str, IndexedDataset]:
    rng = np.random.default_rng(3)
    for index, name in enumerate("ab"):
        write_pair(tmp_path / name, rng.integers(5, 90, 40).astype(np.int32), 5000 * index)
    return {name: IndexedDataset(tmp_path / name) for name in "ab"}


def test_phases_with_transitions_are_runs_of_their_own(tmp_path: Path) -> None:
    streams = streams_of(tmp_path)
    spans = [(0, 60, {"a": 0.7, "b": 0.3}), (60, 100, {"b": 1.0}), (100, 180, {"b": 1, "a": 3})]

    def samples(spans: list[Any], **settings: Any) -> list[list[int]]:
        run = MegatronRun(**settings)
        order = MegatronOrder(lay_out(spans, run), streams, run, 16, 7, VOCAB_SIZE, tmp_path / "cache")
        places = [order.locate(i) for i in range(spans[-1][1])]
        return [order.sources[name].sample(ordinal).tolist() for name, ordinal in places]

    whole = samples(spans)
    alone = [samples([(0, end - start, blend)]) for start, end, blend in spans]
    assert whole == [*alone[0], *alone[1], *alone[2]]
    # Taken up 20 samples into the first phase; and what Megatron would do with a longer last one.
    assert samples([(0, 40, spans[0][2]), (40, 80, spans[1][2])], consumed_samples=20) == whole[20:100]
    longer = samples([(0, 100, spans[2][2])])
    assert samples([(0, 40, spans[1][2]), (40, 120, spans[2][2])], train_samples=140) == [*alone[1], *longer[:80]]
    relaunched = samples(spans, phases="relaunched")
    wholes = [samples([(0, 180, blend)]) for _, _, blend in spans]
    assert relaunched == [*wholes[0][:60], *wholes[1][60:100], *wholes[2][100:]]
    assert relaunched != whole


def test_pieces_and_documents(tmp_path: Path) -> None:
    streams = streams_of(tmp_path)
    run = MegatronRun()
    order = MegatronOrder(lay_out([(0, 90, {"a": 1})], run), streams, run, 64, 7, VOCAB_SIZE, tmp_path / "cache")
    source = pickle.loads(pickle.dumps(order.sources["a"]))
    offsets = streams["a"].sequence_offsets(0, 40)
    for ordinal in range(90):
        tokens, documents = source.sample_and_documents(ordinal)
        assert tokens.tolist() == source.sample(ordinal).tolist() and documents.dtype == np.int32
        assert len(tokens) == 65 and len(documents) == 65
        pieces, expected = source.pieces(ordinal), []
        for number, piece in enumerate(pieces):
            assert piece.length > 0 and (number == 0 or piece.offset == 0)
            begin, end = offsets[piece.sequence : piece.sequence + 2]
            assert piece.offset + piece.length <= end - begin
            stream = streams["a"].tokens(int(begin) + piece.offset, piece.length)
            expected += [(int(token), number) for token in stream]
        assert tokens.tolist() == [token for token, _ in expected]
        assert documents.tolist() == [number for _, number in expected]


def test_ranges_count_what_locate_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, run = streams_of(tmp_path), MegatronRun()
    layouts = lay_out([(0, 60, {"a": 0.7, "b": 0.3}), (60, 100, {"b": 1.0}), (100, 180, {"b": 1, "a": 3})], run)
    order = MegatronOrder(layouts, streams, run, 16, 7, VOCAB_SIZE, tmp_path / "cache")
    for look_back in (2, 1 << 14):
        monkeypatch.setattr("data.megatron_order._LOOK_BACK", look_back)
        for start, end in [(0, 60), (7, 8), (13, 31), (31, 31), (60, 75), (130, 180), (40, 150), (0, 180)]:
            found = [
                (name, ordinal) for name, first, last in order.ranges(start, end) for ordinal in range(first, last)
            ]
            assert sorted(found) == sorted(order.locate(i) for i in range(start, end))


def test_what_would_not_be_the_same_run(tmp_path: Path) -> None:
    def description(**settings: Any) -> dict[str, Any]:
        run = MegatronRun(**{"train_samples": 200, **settings})
        spans = [(0, 60, {"a": 0.7, "b": 0.3}), (60, 100, {"b": 1.0})]
        order = MegatronOrder(lay_out(spans, run), streams, run, 16, 7, VOCAB_SIZE, tmp_path / "cache")
        return json.loads(json.dumps(order.description()))

    streams = streams_of(tmp_path)
    saved = description()
    assert order_differences(saved, description(), 100) == []
    # Only the last phase has other indices, and before it nothing of them has been seen.
    assert order_differences(saved, description(train_samples=300), 60) == []
    [sentence] = order_differences(saved, description(train_samples=300), 61)
    assert "from sample 60 were built for 140 samples and would be for 240" in sentence
    assert "split was None and is now [9.0, 1.0]" in order_differences(saved, description(split=[9, 1]), 10)[0]
    assert "began at sample 0" in order_differences(saved, description(consumed_samples=5), 10)[0]
