"""Refuses, before anything is built, values that cannot run together, on this many ranks or on this machine.

Every refusal is a `ConfigError` of one line: the key, its value, what is wrong with it and what would work. What is
wrong with a value alone the schema refuses (`megatron_fp4/config/schema.py`); precision has `checks/precision.py`.
"""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import math
import netrc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from megatron_fp4.checks.effects import validate_prompts, validate_replay, validate_spikes
from megatron_fp4.config.data_schema import DataConfig
from megatron_fp4.config.file_mode import umask_of
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.training.schedule import WSDSchedule

# Tiles of quantization and of the Hadamard transform are 16 tokens or features wide (at least).
_TILE = 16


def validate(
    config: Config,
    world_size: int,
    device_type: str,
    shared: Mapping[str, tuple[int, int]],
    check_kind: Callable[[DataConfig], None],
) -> None:
    """Raise ConfigError for the first thing besides model and precision that cannot run on `world_size` ranks.

    device_type: what the machine offers, `cuda` or `cpu`. shared: what tensor-parallel ranks divide among them, by its
    key, with the value of that key. check_kind: raises ValueError for what the kind of data refuses.
    """
    _mesh(config, world_size, shared)
    _batch(config, world_size)
    _tokens(config)
    _reduction(config, world_size)
    _schedule(config)
    _data(config.data, check_kind)
    _paths_and_device(config, device_type)
    _looking_inside(config, device_type)
    validate_spikes(config)
    validate_replay(config)
    validate_prompts(config)


def _mesh(config: Config, world_size: int, shared: Mapping[str, tuple[int, int]]) -> None:
    parallel = config.parallel
    tensor, product = parallel.tensor, math.prod(parallel.sizes.values())
    others = {key: size for key, size in parallel.sizes.items() if key != "tensor"}
    sizes = [size for size in _divisors(world_size) if all(count % size == 0 for count, _ in shared.values())]
    with_others = [size for size in sizes if (world_size // size) % (product // tensor) == 0]
    if world_size % product:
        remedies = [f"tensor sizes that work: {_listed(with_others)}"] if with_others else []
        for key, size in others.items():
            rest = product // size
            if size > 1 and tensor in sizes and world_size % rest == 0:
                remedies.append(f"{key} sizes that work: {_listed(_divisors(world_size // rest))}")
        ones = " and ".join(f"parallel.{key}=1" for key, size in others.items() if size > 1)
        remedy = "; ".join(remedies) or f"set {ones}; tensor sizes that work then: {_listed(sizes)}"
        given = " x ".join(f"parallel.{key}={size}" for key, size in parallel.sizes.items())
        raise ConfigError(f"{given} does not divide the {world_size} ranks of this run; {remedy}")
    if parallel.sequence and tensor == 1:
        raise ConfigError(
            "parallel.sequence=true has no effect with parallel.tensor=1; raise parallel.tensor or leave "
            "sequence at null"
        )
    for key, (count, value) in shared.items():
        if count % tensor:
            raise ConfigError(
                f"parallel.tensor={tensor} does not divide {key}={value}; sizes that work for this model on "
                f"{world_size} ranks: {_listed(with_others)}"
            )


def _batch(config: Config, world_size: int) -> None:
    train, parallel = config.train, config.parallel
    micro, length = train.micro_batch_size, train.sequence_length
    if length % _TILE:
        raise ConfigError(
            f"train.sequence_length={length} is not a multiple of {_TILE}; use {_neighbours(length, _TILE)}"
        )
    ranks = parallel.data_parallel_size(world_size)
    together = micro * ranks
    sizes = {"train.global_batch_size": train.global_batch_size}
    for index, phase in enumerate(config.data.phases):
        if phase.global_batch_size is not None:
            sizes[f"data.phases[{index}].global_batch_size"] = phase.global_batch_size
        if phase.sequence_length is not None and (length % phase.sequence_length or phase.sequence_length % _TILE):
            fitting = [size for size in _divisors(length) if size % _TILE == 0]
            raise ConfigError(
                f"data.phases[{index}].sequence_length={phase.sequence_length} does not divide "
                f"train.sequence_length={length} into multiples of {_TILE}; lengths that do: {_listed(fitting)}"
            )
    for key, size in sizes.items():
        if size % together:
            fits = size % ranks == 0
            micro_sizes = f"micro batch sizes that work: {_listed(_divisors(size // ranks))}; " if fits else ""
            raise ConfigError(
                f"{key}={size} is not a multiple of "
                f"train.micro_batch_size={micro} x {ranks} data-parallel ranks = {together}; "
                f"{micro_sizes}global batch sizes that work: {_neighbours(size, together)}"
                f"{_data_parallel_sizes(size, micro, ranks)}"
            )
    sequence_parallel = parallel.tensor > 1 and parallel.sequence is not False
    slice_tokens = _TILE * parallel.tensor
    if sequence_parallel and (micro * length) % slice_tokens:
        # Rounding the length up to a whole slice always works, whatever the micro-batch.
        raise ConfigError(
            f"train.micro_batch_size={micro} x train.sequence_length={length} = {micro * length} tokens is "
            f"not a multiple of {_TILE} x parallel.tensor={parallel.tensor} = {slice_tokens}, which "
            "sequence parallelism needs; use "
            f"train.sequence_length={-(-length // slice_tokens) * slice_tokens} or parallel.sequence=false"
        )


def _tokens(config: Config) -> None:
    """What kernels and records count in 32 and 64 bits."""
    train = config.train
    tokens = train.micro_batch_size * train.sequence_length
    if tokens >= 2**31:
        raise ConfigError(
            f"train.micro_batch_size={train.micro_batch_size} x train.sequence_length={train.sequence_length} = "
            f"{tokens:,} tokens are more than kernels can count (2,147,483,647); lower one of them"
        )
    largest = max((phase.global_batch_size or train.global_batch_size for phase in config.data.phases), default=1)
    if (tokens := train.steps * largest * train.sequence_length) >= 10**18:
        raise ConfigError(
            f"train.steps={train.steps} of {largest:,} x {train.sequence_length:,} tokens are {tokens:.2g} tokens, "
            "more than a run can count (1e18); lower train.steps, the batch or the sequence length"
        )


def _reduction(config: Config, world_size: int) -> None:
    parallel, train = config.parallel, config.train
    if parallel.reduce_gradients == "once":
        return
    if parallel.shards(world_size) == 1:
        sizes = " x ".join(f"parallel.{key}={size}" for key, size in parallel.sizes.items())
        raise ConfigError(
            f"parallel.reduce_gradients=each has no effect: {sizes} leave one shard of "
            f"{world_size} rank{'s' if world_size > 1 else ''}, and gradients are reduced over shards; set it to once"
        )
    together = train.micro_batch_size * parallel.data_parallel_size(world_size)
    largest = max(phase.global_batch_size or train.global_batch_size for phase in config.data.phases)
    if largest <= together:
        raise ConfigError(
            f"parallel.reduce_gradients=each has no effect with one micro-batch a step (train.global_batch_size="
            f"{largest}, {together} together); set it to once, or lower train.micro_batch_size={train.micro_batch_size}"
        )


def _schedule(config: Config) -> None:
    switch = config.precision.switch
    try:
        at_step = WSDSchedule.of(config).switch_step(switch.when)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if switch.when == "before_decay" and at_step == config.train.steps:
        raise ConfigError(
            "precision.switch.when=before_decay, but "
            f"schedule.decay_fraction={config.schedule.decay_fraction} never decays; give a fraction above "
            "0, or a step or never as precision.switch.when"
        )


def _data(data: DataConfig, check_kind: Callable[[DataConfig], None]) -> None:
    try:
        check_kind(data)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not data.boundary_loss and data.documents != "masked":
        raise ConfigError(
            f"data.boundary_loss=false has no effect with data.documents={data.documents}; set data.documents=masked, "
            "or leave it at true"
        )
    if data.num_workers == 0 and data.prefetch != DataConfig().prefetch:
        raise ConfigError(
            f"data.prefetch={data.prefetch} has no effect with data.num_workers=0, which loads each step when it is "
            "asked for; leave it out, or give data.num_workers=1"
        )
    if data.max_epochs == {}:
        raise ConfigError("data.max_epochs={} limits no source; give numbers by source, such as {web: 4}, or null")
    if not data.phases:
        raise ConfigError("data.phases is empty; give at least one: 'data.phases=[{name: main, blend: {web: 1.0}}]'")
    names = [phase.name for phase in data.phases]
    for index, phase in enumerate(data.phases):
        key = f"data.phases[{index}]"
        if names.index(phase.name) != index:
            raise ConfigError(f"{key}.name={phase.name} is taken by another phase; rename one of them")
        if not phase.blend:
            raise ConfigError(f"{key}.blend is empty; give source weights, such as {{web: 0.8, code: 0.2}}")
        if isinstance(phase.blend, dict) and not sum(phase.blend.values()) > 0:
            raise ConfigError(f"{key}.blend={phase.blend} has no weight above 0; give at least one source some")


def _paths_and_device(config: Config, device_type: str) -> None:
    if not config.run.dir.strip():
        raise ConfigError("run.dir is empty; name the folder for everything the run writes, such as runs/first")
    if config.run.file_mode is not None:
        umask_of(config.run.file_mode)
    if config.run.device == "cuda" and device_type != "cuda":
        raise ConfigError("run.device=cuda, but this machine offers no CUDA device; use run.device=auto or cpu")
    tokenizer, table = config.data.tokenizer, config.precision.bf16_blocks.file
    if tokenizer is not None and not tokenizer.startswith("tiktoken:") and not Path(tokenizer).exists():
        raise ConfigError(f"data.tokenizer={tokenizer}: there is no such file or folder; correct the path, or set null")
    if table is not None and not Path(table).is_file():
        raise ConfigError(f"precision.bf16_blocks.file={table}: there is no such file; correct the path, or set null")


def _installed(module: str) -> bool:
    """A folder of that name in the path, such as the one that wandb writes, is no package."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def _looking_inside(config: Config, device_type: str) -> None:
    for key, wanted, module, install, other in (
        ("logging.tensorboard=true", config.logging.tensorboard, "tensorboard", "tensorboard", "false"),
        (
            f"logging.wandb={config.logging.wandb}",
            config.logging.wandb != "disabled",
            "wandb",
            '"megatron_fp4[wandb]"',
            "disabled",
        ),
    ):
        if wanted and not _installed(module):
            raise ConfigError(f"{key} needs the package {module}; pip install {install}, or set {other}")
    if config.logging.wandb == "online" and not _has_wandb_key():
        raise ConfigError(
            "logging.wandb=online needs a key, and none is found in WANDB_API_KEY or ~/.netrc; run `wandb login` once, "
            "export WANDB_API_KEY=..., or set offline (`wandb sync` sends it later) or disabled"
        )
    steps = config.logging.profile_steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= config.train.steps):
        raise ConfigError(
            f"logging.profile_steps={steps} is no window of this run's {config.train.steps} steps; give its first and "
            "last step, such as [11,13], or [] for none"
        )
    if config.logging.memory_history and (device_type != "cuda" or config.run.device == "cpu"):
        raise ConfigError("logging.memory_history=true records CUDA allocations, and this run is on a CPU; use false")


def _has_wandb_key() -> bool:
    """Whether wandb can log in on this machine. Only the first rank logs, and wandb's own WANDB_MODE overrules.

    Asked in wandb's own words by report/wandb_view.py, when it starts; here of every configuration that is checked, and
    so without importing wandb, which takes seconds, writes files and talks.
    """
    if os.environ.get("RANK", "0").strip() != "0" or os.environ.get("WANDB_MODE", "online") != "online":
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = _wandb_settings()
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or "https://api.wandb.ai")
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            # wandb writes the host with its port there, if the address has one.
            known = netrc.netrc(os.path.expanduser(path)) if path else None
            if known and (known.authenticators(server.netloc) or known.authenticators(server.hostname or "")):
                return True
    return "api_key" in settings


def _wandb_settings() -> Mapping[str, str]:
    """What wandb's own files say: of the user, where `wandb login --host` writes the address of a server, and of the
    current folder."""
    own = os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")
    files = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        files.read([os.path.expanduser(f"{own}/settings"), "wandb/settings"])
    return files["default"] if files.has_section("default") else {}


def _divisors(number: int) -> list[int]:
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def _data_parallel_sizes(size: int, micro: int, ranks: int) -> str:
    """Those, next to `ranks`, that divide a global batch of `size` sequences into micro-batches of `micro`."""
    if size % micro:
        return ""
    nearest = sorted(_divisors(size // micro), key=lambda divisor: abs(divisor - ranks))[:6]
    return f"; data-parallel sizes that work with {size} = {_factors(size)}: {_listed(sorted(nearest))}"


def _factors(number: int) -> str:
    """Such as `2^5 x 23`."""
    powers: list[str] = []
    rest, prime = number, 2
    while rest > 1:
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        if power:
            powers.append(f"{prime}^{power}" if power > 1 else str(prime))
        prime += 1
    return " x ".join(powers) or "1"


def _neighbours(number: int, multiple: int) -> str:
    """The nearest positive multiples below and above."""
    below = number // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)


def _listed(values: list[int] | list[str]) -> str:
    return ", ".join(str(value) for value in values)
