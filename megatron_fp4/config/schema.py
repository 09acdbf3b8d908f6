"""The configuration of a run, as frozen dataclasses that every room may read.

The classes check themselves: a mistyped key, a value of the wrong type, an unknown choice or a number out of its range
cannot be constructed. `megatron_fp4/config/compose.py` makes one `Config` of the YAML files under `configs/` and the
command line, and `megatron_fp4/checks/` refuses combinations that cannot run. Below `pretrain.py` no OmegaConf object
exists.

Units: `*_dim` and `num_*` are counts, sequence lengths and vocabularies are in tokens, batch sizes in sequences,
intervals in steps unless the name says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ConfigDict, FiniteFloat
from pydantic.dataclasses import dataclass


class ConfigError(ValueError):
    """What a user got wrong in the configuration: one line that names the key, the value and the remedy."""


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")  # pydantic would read 1 and 0
    return value


def _integer(value: Any) -> Any:
    if isinstance(value, float):
        raise ValueError("a number with a decimal point is no integer")  # pydantic would read 2.0 as 2
    return _number(value)


Integer = Annotated[int, BeforeValidator(_integer)]
Number = Annotated[FiniteFloat, BeforeValidator(_number)]
AtLeastOne = Annotated[Integer, Ge(1)]
AtLeastZero = Annotated[Integer, Ge(0)]
Positive = Annotated[Number, Gt(0)]
NotNegative = Annotated[Number, Ge(0)]
Share = Annotated[Number, Ge(0), Le(1)]
PositiveShare = Annotated[Number, Gt(0), Le(1)]
Beta = Annotated[Number, Ge(0), Lt(1)]
TransformSize = Literal[0, 2, 4, 8, 16, 32, 64, 128]
STRICT = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


@dataclass(frozen=True, config=STRICT)
class Bf16BlocksDefault:
    """How many blocks at each end, in characters of the pattern, a recipe leaves in BF16 (paper, appendix A)."""

    first: AtLeastZero = 0
    last: AtLeastZero = 0


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """A stack of blocks given by `pattern`: `M` Mamba-2, `-` FFN, `*` attention; whitespace is not allowed.

    nvfp4_bf16_blocks, fp8_bf16_blocks: what the recipes of these formats leave in BF16 of this model; they set
        `precision.bf16_blocks` with it. A transformer block is two characters.
    """

    name: str = "tiny"
    pattern: str = "M-*-M-"
    vocab_size: AtLeastOne = 4096
    hidden_dim: AtLeastOne = 256
    ffn_dim: AtLeastOne = 1024
    num_query_heads: AtLeastOne = 8
    num_kv_heads: AtLeastOne = 2
    head_dim: AtLeastOne = 32
    rope: bool = False
    rope_base: Positive = 10000.0
    mamba_num_heads: AtLeastOne = 8
    mamba_head_dim: AtLeastOne = 64
    mamba_num_groups: AtLeastOne = 2
    mamba_state_dim: AtLeastOne = 64
    mamba_conv_width: AtLeastOne = 4
    mamba_chunk_size: AtLeastOne = 64
    norm_eps: Positive = 1e-5
    init_std: Positive = 0.02
    nvfp4_bf16_blocks: Bf16BlocksDefault = field(default_factory=Bf16BlocksDefault)
    fp8_bf16_blocks: Bf16BlocksDefault = field(default_factory=lambda: Bf16BlocksDefault(first=1, last=2))

    @property
    def num_blocks(self) -> int:
        """Number of blocks: one per pattern character."""
        return len(self.pattern)

    @property
    def mamba_inner_dim(self) -> int:
        """Width of the Mamba-2 mixer: heads times head dimension."""
        return self.mamba_num_heads * self.mamba_head_dim


@dataclass(frozen=True, config=STRICT)
class OperandConfig:
    """How one GEMM operand is quantized.

    format: `bf16` (not quantized), `nvfp4`, `mxfp4`, `mxfp8` or `fp8`.
    block: elements that share a scale, rows x columns with the columns along the dot product: nvfp4 `1x16` or
        `16x16`, mxfp4 and mxfp8 `1x32` or `32x32`, fp8 `1x128` or `128x128`. Ignored for `bf16`.
    rounding: `nearest` or `stochastic` (not mxfp8).
    four_over_six: nvfp4 only; per block, map the largest value to 4 where that gives the smaller error.
    power_of_two_scales: fp8 only; round scales down to powers of two, as Transformer Engine does by default.
    reuse_fprop: take the codes that fprop made of the same tensor instead of quantizing along this GEMM's own dot
        product (paper, Fig. 14, "along same dim"). Needs the emulated backend: tensor cores want scales along the
        dot product.
    """

    format: Literal["bf16", "nvfp4", "mxfp4", "mxfp8", "fp8"] = "bf16"
    block: str = "1x16"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    four_over_six: bool = False
    power_of_two_scales: bool = False
    reuse_fprop: bool = False


@dataclass(frozen=True, config=STRICT)
class FpropConfig:
    """y = x W^T. `rht`: size of the random Hadamard transform of both operands, 0 for none."""

    activation: OperandConfig = field(default_factory=OperandConfig)
    weight: OperandConfig = field(default_factory=OperandConfig)
    rht: TransformSize = 0


@dataclass(frozen=True, config=STRICT)
class DgradConfig:
    """dx = dy W."""

    gradient: OperandConfig = field(default_factory=OperandConfig)
    weight: OperandConfig = field(default_factory=OperandConfig)
    rht: TransformSize = 0


@dataclass(frozen=True, config=STRICT)
class WgradConfig:
    """dW = dy^T x."""

    gradient: OperandConfig = field(default_factory=OperandConfig)
    activation: OperandConfig = field(default_factory=OperandConfig)
    rht: TransformSize = 0


@dataclass(frozen=True, config=STRICT)
class Bf16BlocksConfig:
    """Which linears stay in BF16 although the recipe is quantized.

    first, last: blocks counted from each end of the pattern.
    names: shell patterns (`*`, `?`, `[...]`) over the names of linears, such as `blocks.3.*` or `*.out_proj`.
    file: a plan file (YAML with a list under `bf16`), as `scripts/analyze_precision.py` writes.
    """

    first: AtLeastZero = 0
    last: AtLeastZero = 0
    names: list[str] = field(default_factory=list)
    file: str | None = None


@dataclass(frozen=True, config=STRICT)
class RecipeConfig:
    """What the three GEMMs of a linear get.

    name: shown in the plan and the logs.
    amax: `global` reduces tensor maxima over the tensor-parallel group, so that codes do not depend on its size;
        `shard` is Transformer Engine's per-shard behaviour.
    rht_signs: `fixed` (one vector for the whole run), `none`, or `fresh` (a new vector for every call).
    """

    name: str = "bf16"
    amax: Literal["global", "shard"] = "global"
    rht_signs: Literal["fixed", "none", "fresh"] = "fixed"
    fprop: FpropConfig = field(default_factory=FpropConfig)
    dgrad: DgradConfig = field(default_factory=DgradConfig)
    wgrad: WgradConfig = field(default_factory=WgradConfig)


@dataclass(frozen=True, config=STRICT)
class ExceptionConfig:
    """Linears that have another recipe than the run's.

    names: shell patterns over the names of linears, as in `bf16_blocks.names`.
    blocks: letters of `model.pattern`: only linears of these kinds of blocks. Empty: of all.
    precision: whose recipe they take, a name under `configs/precision/`.
    """

    names: list[str] = field(default_factory=lambda: ["*"])
    blocks: str = ""
    precision: str = "bf16"


@dataclass(frozen=True, config=STRICT)
class ComposedException(ExceptionConfig):
    """An exception with its recipe written out: what every one is once the configuration is composed."""

    recipe: RecipeConfig = field(default_factory=RecipeConfig)


@dataclass(frozen=True, config=STRICT)
class SwitchConfig:
    """The change of plan during a run (paper, section 5 and appendix D).

    when: `never`; `before_decay` (the step at which the learning rate starts to decay); a fraction of the run
        such as `0.8`; a step such as `5000`; or `gradient_noise` (papers/004 section 4: the gradient norm fell
        below sqrt(3) times the norm of the quantization noise).
    scope: `both`, `forward` (fprop only) or `backward` (dgrad and wgrad; where dgrad's weights are no longer
        quantized, fprop's take 1x16 blocks).
    target: the precision config to switch to, a name under `configs/precision/`.
    threshold, interval, patience: of `gradient_noise`: the ratio, the steps between measurements and how many
        measurements in a row must lie below the ratio.
    rewarm_steps: steps over which the learning rate climbs again from zero after the switch (0: it does not).
    """

    when: str = "never"
    scope: Literal["both", "forward", "backward"] = "both"
    target: str = "bf16"
    threshold: Positive = 1.7320508
    interval: AtLeastOne = 50
    patience: AtLeastOne = 3
    rewarm_steps: AtLeastZero = 0


@dataclass(frozen=True, config=STRICT)
class DiagnosticsConfig:
    """Measurements of what quantization does to a run; `interval` in steps, 0 switches them off."""

    interval: AtLeastZero = 0


@dataclass(frozen=True, config=STRICT)
class PrecisionConfig(RecipeConfig):
    """What every GEMM of every linear gets, and who computes it.

    compute_dtype: `bfloat16`, or `float32` for comparisons of meshes and devices (emulated backend only).
    backend: `auto` (transformer_engine or emulated), `emulated`, `transformer_engine` or `torch`.
    bf16_blocks, exceptions: linears that have another recipe; the first reason counts, in this order.
    recheck_interval: every so many steps one quantized linear is computed again by the reference and compared, the
        linears taking turns; 0: never. recheck_action: what a difference does: `end` the run, or `warn`.
    """

    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    backend: Literal["auto", "emulated", "transformer_engine", "torch"] = "auto"
    recheck_interval: AtLeastZero = 0
    recheck_action: Literal["end", "warn"] = "end"
    bf16_blocks: Bf16BlocksConfig = field(default_factory=Bf16BlocksConfig)
    exceptions: list[ExceptionConfig] = field(default_factory=list)
    switch: SwitchConfig = field(default_factory=SwitchConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)


@dataclass(frozen=True, config=STRICT)
class PhaseConfig:
    """A span of training with one blend: `fraction` of the run's steps, `blend` source name -> weight."""

    name: str = "main"
    fraction: PositiveShare = 1.0
    blend: dict[str, NotNegative] = field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Where tokens come from.

    kind: `builtin` (the interpreter's own standard library) or `indexed` (Megatron `.bin`/`.idx` files).
    cache_dir: where the built-in corpus is kept; null means the user's cache directory.
    sources, validation: name -> path prefix of the `.bin`/`.idx` pair (`indexed` only).
    tokenizer: path of a `tokenizer.json` (`indexed` only; optional, its fingerprint goes into checkpoints).
    eod_token: that tokenizer's end-of-document token; null means `<|endoftext|>`.
    num_workers: loader processes per rank, 0 for none. prefetch: micro-batches that each prepares ahead.
    blends: named blends that the phases of an experiment refer to, as in `blend: ${data.blends.first}`.
    """

    kind: Literal["builtin", "indexed"] = "builtin"
    cache_dir: str | None = None
    sources: dict[str, str] = field(default_factory=dict)
    validation: dict[str, str] = field(default_factory=dict)
    tokenizer: str | None = None
    eod_token: str | None = None
    phases: list[PhaseConfig] = field(default_factory=list)
    blends: dict[str, dict[str, NotNegative]] = field(default_factory=dict)
    num_workers: AtLeastZero = 1
    prefetch: AtLeastOne = 2


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """The batch arithmetic, and how a step is computed.

    Batch sizes in sequences; tokens per step = global_batch_size * sequence_length.
    kernels: `torch` (plain PyTorch, the reference), `fused` (CUDA with BF16: mamba-ssm, causal-conv1d, cuDNN attention,
        compiled norms and activations) or `auto` (fused on CUDA as far as its packages are installed, else torch).
    activation_checkpointing: `none`, `block` (keep only each block's input and compute it again in the backward pass)
        or `selective` (keep what GEMMs and attention return, compute norms, activations, convolution and scan again).
        Gradients have the same bits in all three.
    """

    steps: AtLeastOne = 300
    global_batch_size: AtLeastOne = 8
    micro_batch_size: AtLeastOne = 4
    sequence_length: AtLeastOne = 256
    max_skipped_steps: AtLeastOne = 10
    kernels: Literal["auto", "torch", "fused"] = "auto"
    activation_checkpointing: Literal["none", "block", "selective"] = "none"


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """AdamW; 1-D parameters and biases are not decayed. `clip_norm` 0 switches clipping off.

    implementation: `torch`, `transformer_engine` or `apex` (training/optimizer.py). Their checkpoints are
        interchangeable, their roundings differ.
    """

    lr: Positive = 2e-3
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip_norm: NotNegative = 1.0
    implementation: Literal["torch", "transformer_engine", "apex"] = "torch"


@dataclass(frozen=True, config=STRICT)
class ScheduleConfig:
    """Warmup-stable-decay. Fractions are of `train.steps`; `min_lr_ratio` is final over peak learning rate.

    decay: `linear`, `cosine`, `exponential` or `1-sqrt`.
    """

    warmup_fraction: Share = 0.02
    decay_fraction: Share = 0.15
    decay: Literal["linear", "cosine", "1-sqrt", "exponential"] = "linear"
    min_lr_ratio: Share = 0.01


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """interval: steps between checkpoints (0: only the final one). keep: how many to keep (0: all).

    resume: `auto` (the newest whole checkpoint of `run.dir`, if any), `never`, or the path of a checkpoint.
    allow_mismatch: resume although data, tokenizer or model differ from what the checkpoint was made with.
    """

    interval: AtLeastZero = 100
    keep: AtLeastZero = 3
    resume: str = "auto"
    allow_mismatch: bool = False


@dataclass(frozen=True, config=STRICT)
class ValidationConfig:
    """interval: steps between validations (0: only at the end). num_samples: held-out sequences per source."""

    interval: AtLeastZero = 50
    num_samples: AtLeastOne = 32


@dataclass(frozen=True, config=STRICT)
class LoggingConfig:
    """interval: steps between printed lines; `metrics.jsonl` has every step. wandb: `online`, `offline`, `disabled`.

    profile_steps: first and last step, counted from 1, of a torch profiler window on rank 0, such as `[11, 13]`; empty:
        none. memory_history: record CUDA allocations on rank 0. Both write into run.dir (training/profiling.py).
    """

    interval: AtLeastOne = 10
    tensorboard: bool = True
    wandb: Literal["online", "offline", "disabled"] = "disabled"
    wandb_project: str = "megatron_fp4"
    profile_steps: list[Integer] = field(default_factory=list)
    memory_history: bool = False


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """The mesh: world size = replicate x shard x tensor, the shard axis being what is left over.

    tensor: tensor-parallel size. sequence: sequence parallelism between the layers (null: on when tensor > 1).
    replicate: number of FSDP replicas (hybrid sharding). reshard: free gathered parameters after every use
    (`true`, less memory) or keep them for the whole step (`false`, less communication).
    timeout_seconds: after which a hanging collective aborts the run. The others wait in one while the first rank tunes
    kernels whose choices neither the checkpoint nor the machine has.
    """

    tensor: AtLeastOne = 1
    sequence: bool | None = None
    replicate: AtLeastOne = 1
    reshard: bool = False
    timeout_seconds: AtLeastOne = 600

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of a given size by their keys, the innermost first; shards lie between `tensor` and the others."""
        return {"tensor": self.tensor, "replicate": self.replicate}

    def shards(self, world_size: int) -> int:
        """What is left over of `world_size`, rounded down."""
        return world_size // math.prod(self.sizes.values())


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """dir: everything the run writes. seed: of initialization, data order and stochastic rounding.

    device: `auto` (CUDA if there is any), `cuda` or `cpu`. deterministic: deterministic kernels only.
    dry: only print what the run would need on WORLD_SIZE ranks (memory, messages, time), computed in this process.
    dry_mfu, dry_peak_tflops: what its time assumes: the share of the peak that a rank reaches, and the peak in TFLOP/s
        (the default is an H200's for dense BF16).
    """

    dir: str = "runs/default"
    seed: AtLeastZero = 1234
    device: Literal["auto", "cuda", "cpu"] = "auto"
    deterministic: bool = True
    dry: bool = False
    dry_mfu: PositiveShare = 0.4
    dry_peak_tflops: Positive = 989.0


@dataclass(frozen=True, config=STRICT)
class Config:
    """The whole run.

    after_switch: the precision that `precision.switch.target` names, as it resolves for this model; None with
        `precision.switch.when=never`. No key of its own: `compose` fills it.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    after_switch: PrecisionConfig | None = None
