"""The configuration of data: where tokens come from, and in which order. See schema.py for how it checks itself."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from megatron_fp4.config.types import (
    STRICT,
    AtLeastOne,
    AtLeastZero,
    NotNegative,
    NumWorkers,
    PathOrPaths,
    PathText,
    Positive,
    PositiveShare,
    Seed,
    SequenceLength,
)


@dataclass(frozen=True, config=STRICT)
class PhaseConfig:
    """A span of training with one blend.

    name: shown in tables and logs; a checkpoint knows a phase by it.
    fraction, steps, tokens: its length, at most one of them, a fraction of the run's steps; one phase of a run may have
        none and gets the rest. Boundaries are whole steps.
    blend: source name -> weight, or `tokens`: all sources, weighted by the tokens that they have.
    global_batch_size, sequence_length: where they are not `train`'s. Batches that grow are a row of phases, which
        continue the same blend. A phase of shorter sequences cuts each of `train.sequence_length` tokens into
        several, so its steps have as many tokens.
    """

    name: str = "main"
    fraction: PositiveShare | None = None
    blend: dict[str, NotNegative] | Literal["tokens"] = field(default_factory=dict)
    steps: AtLeastOne | None = None
    tokens: Positive | None = None
    global_batch_size: AtLeastOne | None = None
    sequence_length: SequenceLength | None = None

    @model_validator(mode="after")
    def _has_data(self) -> PhaseConfig:
        if self.blend != "tokens" and not sum(self.blend.values()) > 0:
            raise ValueError(f"blend={self.blend} has no weight above 0; give some, such as {{web: 0.8, code: 0.2}}")
        return self


@dataclass(frozen=True, config=STRICT)
class MegatronConfig:
    """The Megatron run whose samples `data.order=megatron` continues. Its `--seed` is `data.seed` (or
    `run.seed`), its `--seq-length` `train.sequence_length`, and the sources are in the blend in the order of its
    prefixes.

    split: `--split`, such as `[949,50,1]`, if `--data-path` named the files: training takes the first share, and
        without `data.validation` the second one is held out. null: all, as with `--train-data-path`.
    train_samples: `--train-samples`, or `--train-iters` times `--global-batch-size`: the order depends on it. null: up
        to the end of this run.
    consumed_samples: how many of them Megatron has trained on; this run begins after them. With `transitions`, of the
        phase that it was in.
    phases: `transitions`: each phase has an order of its own, as with `--phase-transition-iterations`; `relaunched`:
        each takes up the order of its blend over the whole run, as when Megatron was started with another
        `--data-path`.
    weighted: whether the prefixes had weights; null: not if it is one. surplus: `--mid-level-dataset-surplus`.
    """

    split: list[NotNegative] | None = None
    train_samples: AtLeastOne | None = None
    consumed_samples: AtLeastZero = 0
    phases: Literal["transitions", "relaunched"] = "transitions"
    weighted: bool | None = None
    surplus: NotNegative = 0.005


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Where tokens come from.

    kind: a row of `KINDS` in data/provider.py: `builtin` (Python's standard library), `indexed` (files in
        Megatron's format).
    cache_dir: where the built-in corpus, indices of `data.order=megatron` and (in `remote`) blocks of URLs are kept;
        null means the user's cache directory.
    sources, validation: name -> what it is read from (`indexed` only): the path of a `.bin`/`.idx` pair without the
        ending, a pattern (`/data/web_*`), a URL (`s3://bucket/web`), a `.yaml` file with a list of these, or a list.
    tokenizer: a `tokenizer.json`, a folder with one, a SentencePiece `.model`, a `.tiktoken` rank file, or
        `tiktoken:NAME` (`indexed` only; optional, its fingerprint goes into checkpoints).
    eod_token: that tokenizer's end-of-document token; null means what the tokenizer says, else `<|endoftext|>`.
    order: of samples: `documents` (documents are shuffled and then cut into samples, otherwise in each epoch),
        `windows` (the files are cut as they lie, and the cuts shuffled: one read a sample, for text that is shuffled
        already) or `megatron` (Megatron-core's, which `megatron` describes; its indices are kept in cache_dir).
    seed: of that order; null means `run.seed`. Runs of one `run.seed` and several of these begin with the
        same weights and read other samples; runs of several `run.seed` and one of these read the same.
    megatron: the run that `data.order=megatron` continues.
    phases: spans of the run, each with its own blend of sources; their lengths add up to the run.
    max_epochs: how often the run may go through a source, as one number for all or by source; null: as often as it
        takes. A run that would exceed it does not start.
    documents: `joined` (a sample's documents see each other) or `masked` (no token sees another document: attention,
        Mamba-2's state and convolution stop at boundaries, and positions begin anew after them).
    boundary_loss: with `masked`, whether a target counts that belongs to another document than the token before it.
    num_workers: loader processes per rank, which prepare the micro-batches of two steps ahead; 0 for none.
    blends: named blends that the phases of an experiment refer to, as in `blend: ${data.blends.first}`.
    """

    kind: str = "builtin"
    cache_dir: PathText | None = None
    sources: dict[str, PathOrPaths] = field(default_factory=dict)
    validation: dict[str, PathOrPaths] = field(default_factory=dict)
    tokenizer: PathText | None = None
    eod_token: str | None = None
    order: Literal["documents", "windows", "megatron"] = "documents"
    seed: Seed | None = None
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    max_epochs: Positive | dict[str, Positive] | None = None
    documents: Literal["joined", "masked"] = "joined"
    boundary_loss: bool = True
    phases: list[PhaseConfig] = field(default_factory=list)
    blends: dict[str, dict[str, NotNegative]] = field(default_factory=dict)
    num_workers: NumWorkers = 1

    @model_validator(mode="after")
    def _fits(self) -> DataConfig:
        names = [phase.name for phase in self.phases]
        for index, name in enumerate(names):
            if names.index(name) != index:
                raise ValueError(f"phases[{index}].name={name} is taken by another phase; rename one of them")
        if not self.boundary_loss and self.documents != "masked":
            raise ValueError(
                f"boundary_loss=false has no effect with documents={self.documents}; set documents=masked, or leave it "
                "at true"
            )
        return self
