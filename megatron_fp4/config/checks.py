"""Check that values can run together, on this number of ranks and on this machine; and read which rank this is.

The schema checks single values and the values within a section. Recipes and models are checked where they are defined.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from megatron_fp4.config.axes import AXES
from megatron_fp4.config.schema import Config, ConfigError

# The smallest tile of quantization and of the Hadamard transform, in tokens or features.
_TILE = 16
# More than any machine has.
_MOST_RANKS = 2**20
# What the ranks of an axis divide without help of the model.
_WITHOUT_THE_MODEL = {"batch", "rows"}


def validate(
    config: Config, world_size: int, device_type: str, divided: Mapping[str, Mapping[str, tuple[int, int]]]
) -> None:
    """Raise ConfigError for the first setting, other than of model, recipes and data that cannot run on these ranks.

    device_type: of the machine, `cuda` or `cpu`. divided: the model's `divided_counts`.
    """
    for refusal in chain(
        _mesh(config, world_size, divided),
        _batch(config, world_size),
        _reproducible(config, world_size),
        _experts(config),
        _effects(config, world_size),
        _machine(config, device_type),
    ):
        raise ConfigError(refusal)


def _mesh(config: Config, world_size: int, divided: Mapping[str, Mapping[str, tuple[int, int]]]) -> Iterator[str]:
    sizes = config.parallel.sizes
    for axis in AXES:
        size = 1 if axis.key is None else sizes[axis.key]
        has_parts = axis.divides and (_WITHOUT_THE_MODEL.issuperset(axis.divides) or divided.get(axis.key or ""))
        if size > 1 and not has_parts:
            yield (
                f"parallel.{axis.key}={size}, but nothing in this run is divided among the ranks of that axis; set "
                f"parallel.{axis.key}=1"
            )
    summed = [f"parallel.{axis.key}={sizes[axis.key]}" for axis in AXES if axis.key and axis.divides == ("batch",)]
    summed = [setting for setting in summed if not setting.endswith("=1")]
    if len(summed) > 1 and not config.parallel.reproducible:  # which sums them itself, without FSDP2
        yield f"{' and '.join(summed)}: gradients are summed over one such axis beside the shards; set the others to 1"
    if world_size % (product := math.prod(sizes.values())):
        ranks = "one rank" if world_size == 1 else f"{world_size} ranks"
        yield (
            f"{' x '.join(f'parallel.{key}={size}' for key, size in sizes.items())} does not divide the {ranks} of "
            f"this run; their product must be one of {_listed(_divisors(world_size))}, or the ranks a multiple of "
            f"{product}"
        )
    for axis_key, counts in divided.items():
        # Of what several axes divide, this one's share.
        others = {key: [k for k in divided if k != axis_key and key in divided[k] and sizes[k] > 1] for key in counts}
        shares = {key: count // math.prod(sizes[k] for k in others[key]) for key, (count, _) in counts.items()}
        for key, (_, value) in counts.items():
            if shares[key] % sizes[axis_key]:
                fitting = [n for n in _divisors(world_size) if not any(share % n for share in shares.values())]
                what = " / ".join((f"{key}={value}", *(f"parallel.{k}={sizes[k]}" for k in others[key])))
                yield (
                    f"parallel.{axis_key}={sizes[axis_key]} does not divide {what}; sizes that work for this model on "
                    f"{world_size} ranks: {_listed(fitting)}"
                )


def _batch_sizes(config: Config) -> dict[str, int]:
    sizes = {"train.global_batch_size": config.train.global_batch_size}
    for index, phase in enumerate(config.data.phases):
        if phase.global_batch_size is not None:
            sizes[f"data.phases[{index}].global_batch_size"] = phase.global_batch_size
    return sizes


def _batch(config: Config, world_size: int) -> Iterator[str]:
    train, parallel, sizes = config.train, config.parallel, _batch_sizes(config)
    micro, length, ranks = train.micro_batch_size, train.sequence_length, parallel.data_parallel_size(world_size)
    for index, phase in enumerate(config.data.phases):
        if phase.sequence_length is not None and length % phase.sequence_length:
            fitting = [size for size in _divisors(length) if size % _TILE == 0]
            yield (
                f"data.phases[{index}].sequence_length={phase.sequence_length} does not divide train.sequence_length="
                f"{length}; multiples of {_TILE} that do: {_listed(fitting)}"
            )
    together = micro * ranks
    for key, size in sizes.items():
        if size % together:
            below = size // together * together
            yield (
                f"{key}={size} is not a multiple of train.micro_batch_size={micro} x {ranks} data-parallel ranks = "
                f"{together}; use {f'{below} or ' if below else ''}{below + together}, or change one of these two"
            )
    tokens, slices = micro * length, _TILE * parallel.tensor
    if parallel.tensor > 1 and parallel.sequence is not False and tokens % slices:
        yield (
            f"train.micro_batch_size={micro} x train.sequence_length={length} = {tokens} tokens is not a multiple of "
            f"{_TILE} x parallel.tensor={parallel.tensor}, which sequence parallelism needs; use train.sequence_length="
            f"{-(-length // slices) * slices} or parallel.sequence=false"
        )
    if tokens >= 2**31:
        yield (
            f"train.micro_batch_size={micro} x train.sequence_length={length} = {tokens:,} tokens are more than "
            "kernels can index (2,147,483,647); lower one of them"
        )
    if (total := train.steps * max(sizes.values()) * length) >= 10**18:
        yield (
            f"train.steps={train.steps} of {max(sizes.values()):,} x {length:,} tokens are {total:.2g} tokens, more "
            "than a run can count (1e18); lower train.steps, the batch or the sequence length"
        )


def _reproducible(config: Config, world_size: int) -> Iterator[str]:
    micro, parallel = config.train.micro_batch_size, config.parallel
    if not parallel.reproducible:
        return
    if not config.run.deterministic:
        yield (
            "parallel.reproducible=true needs deterministic kernels, and run.deterministic is false; set "
            "run.deterministic=true"
        )
    counts = {"data-parallel ranks": parallel.data_parallel_size(world_size)}
    if parallel.reduce_gradients == "each":
        counts |= {f"micro-batches in {key}={size}": size // micro for key, size in _batch_sizes(config).items()}
    for what, count in counts.items():
        if count & (count - 1):
            fitting = f"{2 ** (count.bit_length() - 1)} or {2 ** count.bit_length()}"
            remedy = "" if what.startswith("data") else ", use parallel.reduce_gradients=once"
            yield (
                f"parallel.reproducible=true needs a power of two of {what}; this run has {count}; make it {fitting}"
                f"{remedy}, or set parallel.reproducible=false"
            )


def _experts(config: Config) -> Iterator[str]:
    parallel = config.parallel
    unsupported = {
        "parallel.reshard=true": ("parallel.reshard=false", parallel.reshard),
        "parallel.reduce_gradients=each": ("parallel.reduce_gradients=once", parallel.reduce_gradients == "each"),
        "parallel.reproducible=true": ("parallel.reproducible=false", parallel.reproducible),
    }
    for setting, (remedy, chosen) in unsupported.items():
        if chosen and parallel.expert > 1:
            yield f"{setting} does not go with parallel.expert={parallel.expert}; set {remedy}, or parallel.expert=1"


def _effects(config: Config, world_size: int) -> Iterator[str]:
    """Settings that have no effect, although the user expects one."""
    train, parallel, data, spikes = config.train, config.parallel, config.data, config.spikes
    shards = parallel.shards(world_size)
    largest = max((phase.global_batch_size or train.global_batch_size for phase in data.phases), default=1)
    # FSDP2 reduces once beside a single backward pass.
    once = parallel.reshard and largest <= train.micro_batch_size * parallel.data_parallel_size(world_size)
    if parallel.reduce_gradients == "each" and (shards == 1 or once):
        why = "parallel.reshard=true and steps of one micro-batch" if shards > 1 else "one shard"
        yield f"parallel.reduce_gradients=each has no effect with {why}; set it to once"
    if not data.phases:
        yield "data.phases is empty; give at least one: 'data.phases=[{name: main, blend: {web: 1.0}}]'"
    if spikes.action != "none" and spikes.window >= 2 * train.steps:
        yield (
            f"spikes.window={spikes.window} is not half full in train.steps={train.steps}, so no step would ever be a "
            "spike; use a smaller one, or spikes.action=none"
        )
    if spikes.action == "rollback" and not config.checkpoint.interval:
        yield (
            "spikes.action=rollback has no checkpoint to roll back to with checkpoint.interval=0; set "
            "checkpoint.interval=100, or spikes.action=skip"
        )
    if config.validation.prompts and data.kind != "builtin" and data.tokenizer is None:
        yield (
            f"validation.prompts={config.validation.prompts} needs the tokenizer that made the data; name it as "
            "data.tokenizer, or leave the prompts out"
        )
    steps = config.logging.profile_steps
    if steps and steps[1] > train.steps:
        yield f"logging.profile_steps={steps} is not within this run's {train.steps} steps; give an earlier window"


def _machine(config: Config, device_type: str) -> Iterator[str]:
    if config.run.device == "cuda" and device_type != "cuda":
        yield "run.device=cuda, but this machine has no CUDA device; use run.device=auto or cpu"
    files = {"data.tokenizer": config.data.tokenizer, "precision.bf16_blocks.file": config.precision.bf16_blocks.file}
    for key, path in files.items():
        if path is not None and not Path(path).exists():
            yield f"{key}={path}: there is no such file; correct the path, or set null"
    # A folder of that name, such as the one that wandb writes, is no package.
    there = (found := importlib.util.find_spec("wandb")) is not None and found.origin is not None
    if config.logging.wandb != "disabled" and not there:
        yield f"logging.wandb={config.logging.wandb} needs the package wandb; pip install wandb, or switch it off"
    if config.logging.wandb == "online" and not _may_log_in():
        yield (
            "logging.wandb=online needs a key, and there is neither WANDB_API_KEY nor ~/.netrc; run `wandb login` "
            "once, export WANDB_API_KEY=..., or set offline (`wandb sync` sends it later) or disabled"
        )


def _may_log_in() -> bool:
    """Whether wandb could find a key here. Does not import wandb, which takes seconds. Only the first rank logs in, and
    wandb's own WANDB_MODE has priority."""
    get = os.environ.get
    if get("RANK", "0") != "0" or get("WANDB_MODE", "online") != "online":
        return True
    settings = os.path.join(get("WANDB_CONFIG_DIR", "~/.config/wandb"), "settings")
    paths = (get("NETRC", "~/.netrc"), "~/_netrc", settings)
    keys = get("WANDB_API_KEY") or get("WANDB_IDENTITY_TOKEN_FILE")
    return bool(keys) or any(Path(path).expanduser().is_file() for path in paths)


# The environment variables by which torchrun or another launcher tells a process its rank. torch reads them too, but a
# wrong value there gives a traceback, a wait of minutes for ranks that do not exist, or a run that was not intended.


class LaunchPlace(NamedTuple):
    """world_size: number of ranks. rank, local_rank: of this process, in the run and on its machine, or None."""

    world_size: int
    rank: int | None
    local_rank: int | None


def place_in_run() -> LaunchPlace:
    """The place from the environment. Raises ConfigError for a value that is not a number, or out of its range."""
    size = _variable("WORLD_SIZE", 1, _MOST_RANKS) or 1
    local_size = _variable("LOCAL_WORLD_SIZE", 1, _MOST_RANKS) or _MOST_RANKS
    return LaunchPlace(size, _variable("RANK", 0, size - 1), _variable("LOCAL_RANK", 0, local_size - 1))


def check_launch() -> None:
    """Raise ConfigError unless this process can join the ranks that its environment describes, or is the only rank."""
    place = place_in_run()
    if place.rank is None and place.world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE={place.world_size}, but RANK is not set, so this process would run alone; start the run "
            "with torchrun, or unset WORLD_SIZE (only --check and run.dry=true take it without RANK)"
        )
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if place.rank is not None else ():
        if not os.environ.get(name, "").strip():
            raise ConfigError(
                f"RANK={place.rank} is set and {name} is not, so the ranks cannot meet; start the run with torchrun, "
                "which sets all of them, or unset RANK"
            )
        _variable("MASTER_PORT", 1, 65535)


def _variable(name: str, least: int, most: int) -> int | None:
    if (text := os.environ.get(name)) is None:
        return None
    if not (text.strip().isdecimal() and len(text) < 40 and least <= int(text) <= most):
        raise ConfigError(
            f"the environment variable {name}={text[:40]} is not an integer between {least} and {most:,}; start the "
            "run with torchrun, which sets it, or unset it"
        )
    return int(text)


def _divisors(number: int) -> list[int]:
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
