"""Whole runs' data in Megatron's order, and rearranged, as a configuration asks for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain
from data import provider
from data.indexed import IndexedDataset, index_path
from data.loader import MicroBatchLoader
from data.megatron_order import MegatronSource
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config
from tests.data.megatron_cases import CASES, Case, digest, write_datasets
from tests.training.harness import alone

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("megatron_golden.json").read_text())
UNEVEN = next(case for case in CASES if case.name == "uneven")
SPLIT = next(case for case in CASES if case.name == "single_split")


def overrides(case: Case, folder: Path, *more: str, steps: int | None = None) -> list[str]:
    """pretrain.py's command line for a case, on one rank, in batches of 50."""
    prefixes = [folder / f"{case.name}_{dataset}" for dataset in range(len(case.sequences))]
    if not index_path(prefixes[0]).exists():
        write_datasets(case, folder)
    names = [f"s{number}" for number in range(len(prefixes))]
    sources = ",".join(f"{name}: {prefix}" for name, prefix in zip(names, prefixes, strict=True))
    weights = case.weights or [1.0] * len(names)
    blend = ",".join(f"{name}: {weight}" for name, weight in zip(names, weights, strict=True))
    return [
        "data=indexed",
        "data.order=megatron",
        f"data.sources={{{sources}}}",
        f"data.phases=[{{name: main, blend: {{{blend}}}}}]",
        f"data.cache_dir={folder / 'cache'}",
        "data.num_workers=0",
        f"run.seed={case.seed}",
        f"train.steps={steps or case.num_samples // 50}",
        "train.global_batch_size=50",
        "train.micro_batch_size=10",
        "model.vocab_size=60000",
        *more,
    ]


def opened(arguments: list[str], length: int) -> tuple[Any, MicroBatchLoader, Any]:
    """The data of a configuration. length: of its sequences, for which a configuration wants a multiple of 16."""
    config: Config = compose_config(arguments, pretrain.CONFIGS)
    object.__setattr__(config.train, "sequence_length", length)
    with alone() as mesh:
        run = provider.open_on_rank(config, mesh)
    return run.bundle, run.loader, run.validation


def samples(loader: MicroBatchLoader, start: int, end: int) -> np.ndarray:
    rows = [
        torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1) for step in loader.steps(start, end) for batch in step
    ]
    return torch.cat(rows).numpy()


def test_a_run_from_the_beginning_and_one_that_takes_it_up(tmp_path: Path) -> None:
    _, loader, _ = opened(overrides(UNEVEN, tmp_path), 24)
    whole = samples(loader, 0, 120)
    assert digest(whole) == GOLDEN["uneven"]["samples"]
    assert sum(last - first for _, _, first, last in loader.schedule.source_ranges(0, 6000)) == 6000
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["consumed_samples"] == 6000 and sum(state["position"]["counts"].values()) == 6000
    # Megatron stopped after 2000 samples; this run does the rest, and Megatron's run is as long as it was.
    more = ["data.megatron.consumed_samples=2000", "data.megatron.train_samples=6000"]
    _, loader, _ = opened(overrides(UNEVEN, tmp_path, *more, steps=20), 24)
    assert np.array_equal(samples(loader, 0, 20), whole[2000:3000])


@pytest.mark.slow
def test_workers_serve_the_same(tmp_path: Path) -> None:
    arguments = overrides(UNEVEN, tmp_path)
    alone, workers = (samples(opened([*arguments, f"data.num_workers={count}"], 24)[1], 2, 8) for count in (0, 2))
    assert np.array_equal(alone, workers)


def test_phases_in_a_row_with_one_blend_are_one(tmp_path: Path) -> None:
    """Batches that grow change no order, as with Megatron's --rampup-batch-size."""
    arguments = overrides(UNEVEN, tmp_path)
    [blend] = [argument.partition("blend: ")[2][:-2] for argument in arguments if argument.startswith("data.phases")]
    small = f"{{name: small, steps: 100, global_batch_size: 10, blend: {blend}}}"
    ramp = f"data.phases=[{small},{{name: big, blend: {blend}}}]"
    _, loader, _ = opened([*arguments, ramp, "train.steps=200"], 24)
    assert digest(samples(loader, 0, 200)) == GOLDEN["uneven"]["samples"]


def test_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    def loader_of(*more: str, steps: int | None = None) -> MicroBatchLoader:
        return opened(overrides(UNEVEN, tmp_path, *more, steps=steps), 24)[1]

    first = loader_of()
    before = samples(first, 0, 7)
    state = json.loads(json.dumps(first.state_dict()))
    again = loader_of()
    again.load_state_dict(state)
    assert again.consumed_samples == 350
    assert np.array_equal(samples(again, 7, 20), samples(first, 7, 20)) and len(before) == 350
    pinned = loader_of("data.megatron.train_samples=6000", steps=60)
    pinned.load_state_dict(state)
    assert np.array_equal(samples(pinned, 7, 20), samples(first, 7, 20))
    with pytest.raises(ValueError, match=r"built for 6000 .* would be for 3000.*data\.megatron\.train_samples"):
        loader_of(steps=60).load_state_dict(state)
    with pytest.raises(ValueError, match=r"data\.megatron\.surplus was 0\.005 and is now 0\.01"):
        loader_of("data.megatron.surplus=0.01").load_state_dict(state)
    with pytest.raises(ValueError, match=r"data\.order was megatron and is now documents"):
        loader_of("data.order=documents").load_state_dict(state)
    with pytest.raises(ValueError, match="keep their phases and batches"):
        loader_of("train.global_batch_size=70", "data.megatron.train_samples=6000", steps=50).load_state_dict(state)


def test_the_second_share_of_the_split_is_held_out(tmp_path: Path) -> None:
    split = ["data.megatron.split=[949,51,0]", "validation.num_samples=null", "train.sequence_length=32"]
    bundle, loader, [held_out] = opened(overrides(SPLIT, tmp_path, *split), 32)
    assert digest(samples(loader, 0, 30)) == GOLDEN["single_split"]["samples"]
    [prefix] = [path.with_suffix("") for path in tmp_path.glob("*.idx")]
    offsets = IndexedDataset(prefix).sequence_offsets(0, 1003)
    assert held_out.name == "s0" and bundle.validation["s0"].num_sequences == 51
    assert held_out.stream.num_tokens == offsets[1003] - offsets[952]
    assert np.array_equal(held_out.stream.tokens(0, 5), IndexedDataset(prefix).tokens(int(offsets[952]), 5))
    # Who opens held-out data alone has the same windows.
    _, [alone_opened] = provider.open_held_out(compose_config(overrides(SPLIT, tmp_path, *split), pretrain.CONFIGS))
    assert alone_opened.num_samples == held_out.num_samples
    assert alone_opened.batch(0, 3, 9).tokens.equal(held_out.batch(0, 3, 9).tokens)
    source = loader.sources["s0"]
    assert isinstance(source, MegatronSource)
    assert max(piece.sequence for sample in range(300) for piece in source.pieces(sample)) < 952
    # Those that are named are the ones.
    for path in tmp_path.glob("single_split_0.*"):
        shutil.copy(path, path.with_stem("copy"))
    named = [*split, f"data.validation={{web: {tmp_path}/copy}}"]
    assert [held_out.name for held_out in opened(overrides(SPLIT, tmp_path, *named), 32)[2]] == ["web"]
