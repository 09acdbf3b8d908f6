"""The data of a run from its configuration: opened, laid out in phases, cut into a share for each rank, agreed on.

config is the whole configuration, and mesh what says which rank this is (`dp_rank`, `dp_size`, `dp_group`, `device`);
this room knows neither's class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from data.agreement import agreed
from data.bundle import DataBundle
from data.fim_settings import with_fim
from data.kinds import KINDS
from data.loader import MicroBatchLoader
from data.megatron_schedule import MegatronSchedule, held_out_by_split, megatron_run, open_megatron
from data.phase_lengths import Phase
from data.phases import PhaseSchedule
from data.samples import Samples, SampleSource
from data.text_bytes import bytes_per_token
from data.validation import ValidationSet, Yardstick


def phase_schedule(config: Any, num_tokens: Mapping[str, int]) -> PhaseSchedule:
    """The phases laid out. num_tokens: of each source, for blends by tokens; without any these have one source.

    Raises ValueError for phases that do not fill the run or cannot be.
    """
    train = config.train
    phases = [
        Phase(
            phase.name,
            phase.fraction,
            phase.blend if isinstance(phase.blend, dict) else num_tokens or {"any": 1},
            phase.steps,
            phase.tokens,
            phase.global_batch_size,
            phase.sequence_length,
            by_tokens=phase.blend == "tokens",
        )
        for phase in config.data.phases
    ]
    length = train.steps, train.global_batch_size, train.sequence_length
    if config.data.order == "megatron":
        return MegatronSchedule(phases, *length, megatron_run(config.data))
    return PhaseSchedule(phases, *length)


def open_run_data(config: Any, mesh: Any) -> tuple[DataBundle, MicroBatchLoader, list[ValidationSet]]:
    """The data of a run: opened, laid out in phases, and cut into this rank's micro-batches and held-out windows.

    Raises ValueError or OSError for what cannot be opened or does not fit.
    """
    train, data, vocab_size = config.train, config.data, config.model.vocab_size
    masked = data.documents == "masked"
    bundle = KINDS[data.kind].open(data, vocab_size)
    phases = phase_schedule(config, {name: stream.num_tokens for name, stream in bundle.train.items()})
    sources: Mapping[str, Samples]
    cut = train.sequence_length, config.data_seed, vocab_size
    if isinstance(phases, MegatronSchedule):
        sources = open_megatron(phases, bundle.train, megatron_run(data), *cut, data.cache_dir).sources
        bundle = replace(bundle, validation=held_out_by_split(bundle, data.megatron.split))
    else:
        sources = {name: SampleSource(name, stream, *cut, data.order) for name, stream in bundle.train.items()}
    loader = MicroBatchLoader(
        phases,
        with_fim(sources, data.fim, bundle.tokenizer),
        train.micro_batch_size,
        mesh.dp_rank,
        mesh.dp_size,
        data.num_workers,
        device=mesh.device,
        prefetch=data.prefetch,
        allow_other_data=config.checkpoint.allow_mismatch,
        # Before the other ranks give up in a collective, and not name the worker.
        timeout_seconds=0.8 * config.parallel.timeout_seconds,
        masked=masked,
        boundary_loss=data.boundary_loss,
    )
    return bundle, loader, held_out_sets(config, bundle)


def open_held_out(config: Any) -> tuple[DataBundle, list[ValidationSet]]:
    """The held-out data alone, as `open_run_data` opens it, for who does not train.

    Raises ValueError or OSError for what cannot be opened or does not fit.
    """
    data = config.data
    bundle = KINDS[data.kind].open(data, config.model.vocab_size)
    if data.order == "megatron":
        bundle = replace(bundle, validation=held_out_by_split(bundle, data.megatron.split))
    return bundle, held_out_sets(config, bundle)


def held_out_sets(config: Any, bundle: DataBundle) -> list[ValidationSet]:
    """The run's held-out windows, set by set. bundle: with the held-out sources as the run has them."""
    return [
        ValidationSet(
            name,
            stream,
            config.train.sequence_length,
            config.validation.num_samples,
            config.model.vocab_size,
            masked=config.data.documents == "masked",
            boundary_loss=config.data.boundary_loss,
        )
        for name, stream in bundle.validation.items()
    ]


def yardsticks(
    validation: list[ValidationSet], bundle: DataBundle, mesh: Any, is_refusal: Callable[[Exception], bool]
) -> dict[str, Yardstick]:
    """What held-out losses are measured by, by set. A collective; each rank reads its share of the windows.

    Raises, on all ranks, ValueError for token ids outside the model's vocabulary, and what reading raises.
    """
    shares = agreed(
        lambda: [held_out.target_counts(mesh.dp_rank, mesh.dp_size) for held_out in validation],
        lambda _: {},
        is_refusal,
    )
    lengths = None if bundle.tokenizer is None else bundle.tokenizer.byte_lengths()
    found = {}
    for held_out, share in zip(validation, shares, strict=True):
        counts = share.to(mesh.device)
        dist.all_reduce(counts, group=mesh.dp_group)
        found[held_out.name] = Yardstick.of(counts.cpu(), lengths, bytes_per_token(held_out.stream))
    return found


def data_facts(opened: tuple[DataBundle, MicroBatchLoader, list[ValidationSet]]) -> dict[str, dict[str, Any]]:
    """What has to be the same data on all ranks, by what it is: JSON values."""
    bundle, loader, _ = opened
    fingerprint = dict(loader.fingerprint)
    del fingerprint["sources"]
    facts = {
        f"{what} {name}": {"num_tokens": stream.num_tokens, "identity": stream.identity()}
        for what, streams in (("source", bundle.train), ("validation source", bundle.validation))
        for name, stream in streams.items()
    }
    tokenizer = bundle.tokenizer and bundle.tokenizer.fingerprint()
    return {**facts, "a tokenizer": {"fingerprint": tokenizer}, "a configuration": fingerprint}
