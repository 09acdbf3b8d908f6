"""Whole runs' data in Megatron's order, and rearranged, as a configuration asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models

import pretrain
from data import opening
from data.indexed import IndexedDataset, IndexedDatasetWriter, index_path
from data.loader import MicroBatchLoader
from data.megatron_order import MegatronSource
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.training.build import is_refusal
from tests.data.megatron_cases import CASES, Case, digest, write_datasets
from tests.training.harness import alone, launch, toy_mesh

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
        f"train.sequence_length={case.seq_length}",
        "model.vocab_size=60000",
        *more,
    ]


def opened(arguments: list[str], length: int) -> tuple[Any, MicroBatchLoader, Any]:
    """The data of a configuration. length: of its sequences; quantization would want a multiple of 16."""
    config: Config = compose_config(arguments, pretrain.CONFIGS)
    assert config.train.sequence_length == length
    with alone() as mesh:
        return opening.open_run_data(config, mesh)


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
    fim = with_fim(tmp_path, "data.fim={code: {}}", "data.order=megatron", f"data.cache_dir={tmp_path / 'cache'}")
    alone, workers = (samples(opened([*fim, f"data.num_workers={count}"], 64)[1], 2, 8) for count in (0, 2))
    assert np.array_equal(alone, workers) and alone.max() == 23


def test_phases_in_a_row_with_one_blend_are_one(tmp_path: Path) -> None:
    """Batches that grow change no order, as with Megatron's --rampup-batch-size."""
    arguments = overrides(UNEVEN, tmp_path)
    [blend] = [argument.partition("blend: ")[2][:-2] for argument in arguments if argument.startswith("data.phases")]
    small = f"{{name: small, steps: 100, global_batch_size: 10, blend: {blend}}}"
    ramp = f"data.phases=[{small},{{name: big, blend: {blend}}}]"
    _, loader, _ = opened([*arguments, ramp, "train.steps=200"], 24)
    assert digest(samples(loader, 0, 200)) == GOLDEN["uneven"]["samples"]


def test_a_checkpoint_is_gone_on_with(tmp_path: Path) -> None:
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
    split = ["data.megatron.split=[949,51,0]", "validation.num_samples=null"]
    bundle, loader, [held_out] = opened(overrides(SPLIT, tmp_path, *split), 32)
    assert digest(samples(loader, 0, 30)) == GOLDEN["single_split"]["samples"]
    [prefix] = [path.with_suffix("") for path in tmp_path.glob("*.idx")]
    offsets = IndexedDataset(prefix).sequence_offsets(0, 1003)
    assert held_out.name == "s0" and bundle.validation["s0"].num_sequences == 51
    assert held_out.stream.num_tokens == offsets[1003] - offsets[952]
    assert np.array_equal(held_out.stream.tokens(0, 5), IndexedDataset(prefix).tokens(int(offsets[952]), 5))
    # Who opens held-out data alone has the same windows.
    _, [alone_opened] = opening.open_held_out(compose_config(overrides(SPLIT, tmp_path, *split), pretrain.CONFIGS))
    assert alone_opened.num_samples == held_out.num_samples
    assert alone_opened.batch(0, 3, 9).tokens.equal(held_out.batch(0, 3, 9).tokens)
    source = loader.sources["s0"]
    assert isinstance(source, MegatronSource)
    assert max(piece.sequence for sample in range(300) for piece in source.pieces(sample)) < 952
    # Those that are named are the ones.
    named = [*split, f"data.validation={{web: {prefix}}}"]
    assert [held_out.name for held_out in opened(overrides(SPLIT, tmp_path, *named), 32)[2]] == ["web"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["data.order=documents", "data.megatron.split=[9,1]"],
            "data.megatron has no effect with data.order=documents",
        ),
        (["data.order=windows", "data.cache_dir=/tmp", "data=indexed"], "only data.order=megatron keeps indices"),
        (["data.order=megatron", "data.megatron.split=[0]"], "data.megatron.split=[0.0] is not up to three shares"),
        (["data.order=megatron", "data.megatron.train_samples=4"], "less than the 2400 samples up to this run's end"),
        (["data.order=megatron", "data.megatron.phases=both"], "data.megatron.phases=both"),
        (
            ["data.order=megatron", "data.megatron.phases=relaunched", "data.phases=[{name: a, blend: {code: 1}}]"],
            "relaunched has no effect with one phase",
        ),
        (["data.fim={web: {}}"], "the tokenizer of the built-in corpus has no tokens for it"),
        (["data=indexed", "data.fim={web: {}}"], "data.fim.web has no effect: no phase draws from web, only from a"),
        (["data=indexed", "data.fim={a: {}}"], "data.fim.a names its tokens, and there is no tokenizer"),
        (["data.fim={code: {rate: 2}}"], "data.fim"),
        (["data.fim={code: {rat: 0.5}}"], "data.fim"),
    ],
)
def test_misuse_is_refused_before_anything_is_opened(given: list[str], message: str) -> None:
    if "data=indexed" in given:
        given = [*given, "data.sources={a: /nowhere}", "data.phases=[{name: a, blend: {a: 1}}]"]
    with pytest.raises(ConfigError) as error:
        pretrain.configure(given)
    assert message in str(error.value) and "\n" not in str(error.value)


FIM = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


def with_fim(folder: Path, *more: str) -> list[str]:
    """A run on one source whose tokenizer has the tokens of fill-in-the-middle."""
    made = Tokenizer(models.BPE(vocab={chr(97 + i): i for i in range(20)}, merges=[]))
    made.add_special_tokens([AddedToken(name, special=True) for name in FIM])
    made.save(str(folder / "tokenizer.json"))
    if not (folder / "code.idx").exists():
        rng = np.random.default_rng(0)
        with IndexedDatasetWriter(folder / "code", np.uint16) as writer:
            for _ in range(200):
                writer.add_document(np.append(rng.integers(0, 20, rng.integers(5, 90)), 20))
    return [
        "data=indexed",
        f"data.sources={{code: {folder / 'code'}}}",
        "data.phases=[{name: main, blend: {code: 1}}]",
        f"data.tokenizer={folder / 'tokenizer.json'}",
        "data.num_workers=0",
        "train.steps=10",
        "train.sequence_length=64",
        "model.vocab_size=64",
        *more,
    ]


def test_fill_in_the_middle_in_a_run(tmp_path: Path) -> None:
    plain = opened(with_fim(tmp_path), 64)[1]
    some = opened(with_fim(tmp_path, "data.fim={code: {}}", "data.documents=masked"), 64)[1]
    rearranged = samples(some, 0, 10)
    assert {21, 22, 23} <= set(rearranged.flatten().tolist()) and samples(plain, 0, 10).max() == 20
    for step in some.steps(0, 10):
        for batch in step:
            assert batch.documents is not None
            # A document ends with its end, rearranged or not.
            ends = (batch.documents[:, 1:] != batch.documents[:, :-1]).nonzero().tolist()
            assert ends and all(batch.tokens[row, place] == 20 for row, place in ends)
    state = json.loads(json.dumps(some.state_dict()))
    with pytest.raises(ValueError, match=r"'code' had data\.fim and has none now"):
        plain.load_state_dict(state)
    with pytest.raises(ValueError, match=r"rate 0\.5, .* and now has data\.fim rate 0\.25"):
        opened(with_fim(tmp_path, "data.fim={code: {rate: 0.25}}"), 64)[1].load_state_dict(state)
    with pytest.raises(ConfigError, match=r"data\.fim\.code\.rate=0 is out of range; give a number above 0"):
        opened(with_fim(tmp_path, "data.fim={code: {rate: 0}}"), 64)
    with pytest.raises(ValueError, match=r"data\.fim\.code\.prefix=<pre> is no token of"):
        opened(with_fim(tmp_path, 'data.fim={code: {prefix: "<pre>"}}'), 64)


def yardsticks(rank: int, runs: list[list[str]]) -> list[Any]:
    """Of each run, or why there are none."""
    found: list[Any] = []
    for arguments in runs:
        config, mesh = compose_config(arguments, pretrain.CONFIGS), toy_mesh()
        bundle, _, validation = opening.open_run_data(config, mesh)
        try:
            found.append(opening.yardsticks(validation, bundle, mesh, is_refusal))
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_ranks_count_validation_together(tmp_path: Path) -> None:
    arguments = with_fim(tmp_path, f"data.validation={{all: {tmp_path / 'code'}}}", "validation.num_samples=null")
    bundle, _, validation = opened(arguments, 64)
    with IndexedDatasetWriter(tmp_path / "wrong", np.uint16) as writer:
        writer.add_document([*range(60), *[60] * 64 * 64, 999, *[3] * 80])
    wrong = [*arguments, f"data.validation={{wrong: {tmp_path / 'wrong'}}}"]
    both = launch(yardsticks, 2, [arguments, wrong])
    with alone() as mesh:
        one = opening.yardsticks(validation, bundle, mesh, is_refusal)
    assert [found[0] for found in both] == [one, one]
    assert one["all"].targets == (IndexedDataset(tmp_path / "code").num_tokens - 1) // 64 * 64
    # A rank that meets an id beyond the vocabulary does not leave the others waiting.
    assert both[0][1] == both[1][1] and "'wrong'" in both[0][1] and "vocabulary of 64" in both[0][1]
