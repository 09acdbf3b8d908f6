"""The configuration of a run, as frozen dataclasses.

The classes check their values: a mistyped key, a value of the wrong type, an unknown choice, a number out of its range
or a section with contradicting values raises an error. `compose.py` makes a `Config` from the YAML files under
`configs/` and the command line, and `checks.py` refuses combinations that cannot run. The run uses no OmegaConf object.

Integers may be written 1000, 1_000, 1e3, 1k, 1.5M, 2B (or 2G) or 1T: k, M, B, G and T are powers of a thousand.
Units: `*_dim` and `num_*` are counts, sequence lengths and vocabularies are in tokens, batch sizes in sequences,
intervals in steps unless the name says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from megatron_fp4.config.axes import AXES, Axis
from megatron_fp4.config.precision_schema import PrecisionConfig
from megatron_fp4.config.types import (
    STRICT,
    AtLeastOne,
    AtLeastZero,
    AutoSwitch,
    Beta,
    Integer,
    LearningRate,
    NotNegative,
    NumWorkers,
    PathOrPaths,
    PathText,
    Positive,
    PositiveShare,
    Seconds,
    Seed,
    SequenceLength,
    Share,
)

# Fields of a `Config` that a user cannot set: composing fills them in.
ADDED = ("after_switch", "from_environment")


class ConfigError(ValueError):
    """An error of the user in the configuration: one line with the key, the value and the remedy."""


@dataclass(frozen=True, config=STRICT)
class Bf16BlocksDefault:
    """How many blocks at each end of the pattern a recipe keeps in BF16 (paper, appendix A). A character is a block."""

    first: AtLeastZero = 0
    last: AtLeastZero | None = None
    """blocks at the beginning and at the end; null: the last 15%, rounded up, as in the paper's 8B."""


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """A stack of blocks, sizes in elements."""

    name: str = "tiny"
    """in logs and exports."""
    pattern: str = "M-*-M-"
    """the blocks, a letter each: `M` Mamba-2, `*` attention, `-` FFN, `G` gated FFN, `E` experts (table in
    models/pattern.py). After each `/` the blocks of a depth of multi-token prediction (MTP), as in `ME*E/*E`."""
    vocab_size: AtLeastOne = 4096
    """rows of the embedding and the head; the tokenizer's largest id plus one, or more."""
    hidden_dim: AtLeastOne = 256
    """of the residual stream."""
    ffn_dim: AtLeastOne = 1024
    """of the FFN's inner layer. Its activation is a squared ReLU, that of a gated FFN SwiGLU."""
    num_query_heads: AtLeastOne = 8
    num_kv_heads: AtLeastOne = 2
    head_dim: AtLeastOne = 32
    """of attention; groups of query heads share a KV head."""
    rope: bool = False
    """rotary positions in attention."""
    rope_base: Positive = 10000.0
    """of rotary positions."""
    mamba_num_heads: AtLeastOne = 8
    mamba_head_dim: AtLeastOne = 64
    """of Mamba-2; their product is its inner width."""
    mamba_num_groups: AtLeastOne = 2
    """of B and C; the heads of a group share them."""
    mamba_state_dim: AtLeastOne = 64
    """of a head's state."""
    mamba_conv_width: AtLeastOne = 4
    """taps of its convolution."""
    mamba_chunk_size: AtLeastOne = 64
    """tokens of a chunk of the scan; the result does not depend on it."""
    moe_num_experts: AtLeastOne = 8
    moe_top_k: AtLeastOne = 2
    """FFNs of an `E` block, and how many of them a token passes."""
    moe_ffn_dim: AtLeastOne = 256
    """of an expert's inner layer."""
    moe_shared_ffn_dim: AtLeastOne = 512
    """of the shared expert's, which every token passes."""
    moe_activation: Literal["squared_relu", "swiglu"] = "squared_relu"
    """of all experts."""
    moe_latent_dim: AtLeastZero = 0
    """width of the experts' inputs and outputs (0: `hidden_dim`)."""
    moe_score: Literal["sigmoid", "softmax"] = "sigmoid"
    """of the router's logits."""
    moe_scaling: Positive = 1.0
    """factor of the experts' weights: a token's scores over their sum."""
    moe_weight: Literal["after_down", "before_down"] = "after_down"
    """where the weight multiplies: after the down projection (transformers) or before it (Megatron; other codes)."""
    moe_num_groups: AtLeastOne = 1
    moe_top_groups: AtLeastOne = 1
    """equal groups of experts, and from how many of them those of a token are."""
    moe_group_score: Literal["top_2", "top_share"] = "top_2"
    """of a group: the sum of its best two (transformers), or its best `moe_top_k / moe_top_groups` (Megatron)."""
    moe_bias_rate: NotNegative = 1e-3
    """by which each step moves an expert's bias, up after few tokens."""
    moe_aux_loss: NotNegative = 1e-4
    """coefficient of Megatron's `seq_aux_loss`."""
    moe_z_loss: NotNegative = 0.0
    """coefficient of the router's z-loss."""
    mtp_use_repeated_layer: bool = False
    """whether one set of weights is used for all depths of multi-token prediction."""
    mtp_loss_scaling_factor: Positive = 0.1
    """weight of the mean loss over these depths, beside the main loss with weight 1."""
    norm_eps: Positive = 1e-5
    """of RMS norms."""
    init_std: Positive = 0.02
    """of initial weights."""
    nvfp4_bf16_blocks: Bf16BlocksDefault = field(default_factory=Bf16BlocksDefault)
    fp8_bf16_blocks: Bf16BlocksDefault = field(default_factory=lambda: Bf16BlocksDefault(first=1, last=2))
    """the blocks that recipes of these formats keep in BF16; the recipes set `precision.bf16_blocks` to it."""

    @property
    def main_pattern(self) -> str:
        """The pattern without multi-token prediction."""
        return self.pattern.partition("/")[0]

    @property
    def mtp_patterns(self) -> list[str]:
        """The blocks of each depth of multi-token prediction."""
        return self.pattern.split("/")[1:]

    @property
    def mtp_sets(self) -> list[str]:
        """The blocks of each set of weights of multi-token prediction."""
        return self.mtp_patterns[:1] if self.mtp_use_repeated_layer else self.mtp_patterns

    @property
    def num_blocks(self) -> int:
        return len(self.main_pattern)

    @property
    def mamba_inner_dim(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim


@dataclass(frozen=True, config=STRICT)
class PhaseConfig:
    """A part of the run with one blend of sources."""

    name: str = "main"
    """shown in tables and logs; checkpoints identify a phase by it."""
    fraction: PositiveShare | None = None
    steps: AtLeastOne | None = None
    tokens: Positive | None = None
    """the length of the phase (`fraction`: of the run's steps); set at most one. One phase may have none and gets the
    remaining steps. Rounded to whole steps."""
    blend: dict[str, NotNegative] | Literal["tokens"] = field(default_factory=dict)
    """source name -> weight, or `tokens`: all sources, weighted by their number of tokens."""
    global_batch_size: AtLeastOne | None = None
    sequence_length: SequenceLength | None = None
    """instead of those of `train`. Shorter sequences are pieces of samples, so a step has the same number of tokens."""

    @model_validator(mode="after")
    def _has_data(self) -> PhaseConfig:
        if self.blend != "tokens" and not sum(self.blend.values()) > 0:
            raise ValueError(f"blend={self.blend} has no weight above 0; give some, such as {{web: 0.8, code: 0.2}}")
        return self


@dataclass(frozen=True, config=STRICT)
class MegatronConfig:
    """The Megatron run whose samples `data.order=megatron` continues. Set `data.seed` (or `run.seed`) to its `--seed`
    and `train.sequence_length` to its `--seq-length`; list the sources of the blend in the order of its prefixes."""

    split: list[NotNegative] | None = None
    """`--split`, such as `[949,50,1]`: the first share is for training; the second one is held out, unless
    `data.validation` is set. null: no split, as with `--train-data-path`."""
    train_samples: AtLeastOne | None = None
    """`--train-samples`, or `--train-iters` times `--global-batch-size`. null: up to the end of this run."""
    consumed_samples: AtLeastZero = 0
    """samples that Megatron has trained on (with `transitions`, in its last phase)."""
    phases: Literal["transitions", "relaunched"] = "transitions"
    """`transitions`: each phase has its own order (`--phase-transition-iterations`); `relaunched`: that of its blend
    over the whole run (Megatron started again with another `--data-path`)."""
    weighted: bool | None = None
    """whether the prefixes had weights; null: yes, if there are several."""
    surplus: NotNegative = 0.005
    """`--mid-level-dataset-surplus`."""


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Where tokens come from."""

    kind: str = "builtin"
    """`builtin` (Python's standard library), `indexed` (Megatron's format), or your row of data/provider.py."""
    cache_dir: PathText | None = None
    """folder of the built-in corpus, of indices for `data.order=megatron` and (in `remote`) of URLs; null: the user's
    cache directory."""
    sources: dict[str, PathOrPaths] = field(default_factory=dict)
    validation: dict[str, PathOrPaths] = field(default_factory=dict)
    """name -> files (`indexed` only): the path of a `.bin`/`.idx` pair without the ending, a pattern (`/data/web_*`), a
    URL (`s3://bucket/web`), a `.yaml` file with a list of these, or a list."""
    tokenizer: PathText | None = None
    """a `tokenizer.json`, a folder with one, a SentencePiece `.model`, or a `.tiktoken` rank file (`indexed` only)."""
    eod_token: str | None = None
    """the token that ends documents; null: as the data's `.json` says, else as the tokenizer, else `<|endoftext|>`."""
    order: Literal["documents", "windows", "megatron"] = "documents"
    """of samples: `documents` (shuffled in each epoch, then cut into samples), `windows` (files are cut in their own
    order, and the cuts shuffled) or `megatron` (Megatron-core's, by the keys of `megatron`)."""
    seed: Seed | None = None
    """of the order of samples only; null: `run.seed`."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """the run that `data.order=megatron` continues."""
    max_epochs: Positive | dict[str, Positive] | None = None
    """the most epochs of a source, one number for all or by source; a run that would exceed it does not start."""
    documents: Literal["joined", "masked"] = "joined"
    """`joined` (a sample's documents see each other) or `masked` (no token sees another document)."""
    boundary_loss: bool = True
    """with `masked`, whether a target counts if it is in another document than the token before it."""
    phases: list[PhaseConfig] = field(default_factory=list)
    """parts of the run, each with its own blend; their lengths add up to the run."""
    blends: dict[str, dict[str, NotNegative]] = field(default_factory=dict)
    """named blends for the phases of experiments, as in `blend: ${data.blends.first}` (docs/quickstart.md)."""
    num_workers: NumWorkers = 1
    """loader processes per rank, which prepare micro-batches two steps ahead; 0: none."""

    @model_validator(mode="after")
    def _fits(self) -> DataConfig:
        names = [phase.name for phase in self.phases]
        for index, name in enumerate(names):
            if names.index(name) != index:
                raise ValueError(f"phases[{index}].name={name} is the name of another phase too; rename one of them")
        if not self.boundary_loss and self.documents != "masked":
            raise ValueError(
                f"boundary_loss=false has no effect with documents={self.documents}; set documents=masked, or leave it "
                "at true"
            )
        return self


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """The batch, and how a step is computed. A step has global_batch_size * sequence_length tokens."""

    steps: AtLeastOne = 300
    """of the whole run, including the steps before a resume."""
    global_batch_size: AtLeastOne = 8
    """sequences of a step on all ranks together."""
    micro_batch_size: AtLeastOne = 4
    """sequences that a rank computes at once; a step adds up the gradients of its micro-batches."""
    sequence_length: SequenceLength = 256
    """tokens of a sequence."""
    max_skipped_steps: AtLeastOne = 10
    """a step whose loss or gradient norm is not finite is skipped; after this many in a row the run ends."""
    kernels: Literal["auto", "torch", "fused"] = "auto"
    """`torch` (plain PyTorch, the reference), `fused` (CUDA with BF16: mamba-ssm, causal-conv1d, cuDNN attention,
    compiled norms and activations) or `auto` (fused on CUDA, if the packages are installed)."""
    activation_checkpointing: Literal["none", "block", "selective"] = "none"
    """`block`: keep only each block's input, and compute the block again in the backward pass; `selective`: keep the
    outputs of GEMMs and attention, and compute the rest again. In BF16, gradients have the same bits in all three."""
    cuda_graphs: AutoSwitch = "auto"
    """capture forward and backward of a micro-batch once and replay them: the same bits in less host time."""


@dataclass(frozen=True, config=STRICT)
class SpikesConfig:
    """Steps whose loss or gradient norm is far above those before (the rule: training/callbacks/bad_steps.py)."""

    action: Literal["none", "skip", "rollback"] = "none"
    """`skip`: no update with that batch; `rollback`: restore weights and moments of the last checkpoint and continue
    with the next batch (the data since the checkpoint is skipped)."""
    threshold: Positive = 6.0
    """in robust standard deviations above the median."""
    window: AtLeastOne = 128
    """how many accepted steps the median is taken over; half as many of the same phase and precision come first."""
    max_in_row: AtLeastOne = 5
    """after this many spikes in a row (with `rollback`, since the same checkpoint) the run ends with a diagnosis."""


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """AdamW; 1-D parameters and biases are not decayed."""

    lr: LearningRate = 2e-3
    """the peak learning rate."""
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Positive = 1e-8
    """of Adam."""
    weight_decay: NotNegative = 0.1
    """decoupled, multiplied by the learning rate."""
    clip_norm: NotNegative = 1.0
    """a gradient whose norm over all parameters is larger is scaled down to it. 0: no limit."""


@dataclass(frozen=True, config=STRICT)
class ScheduleConfig:
    """The learning rate: warm-up from zero, constant, decay."""

    warmup_fraction: Share = 0.02
    decay_fraction: Share = 0.15
    """of `train.steps`, at the beginning and the end."""
    decay: Literal["linear", "cosine", "1-sqrt", "exponential"] = "linear"
    """its shape."""
    min_lr_ratio: Share = 0.01
    """final over peak learning rate."""


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """When checkpoints are saved, what a run begins from, and exports of its weights."""

    interval: AtLeastZero = 100
    """steps between checkpoints (0: only the final one)."""
    keep: AtLeastZero = 3
    """how many to keep (0: all)."""
    asynchronous: bool = True
    """save a copy in host memory while training continues; `false`: training waits. A failed save is tried again, then
    given up; after three in a row the run ends."""
    resume: PathText = "auto"
    """`auto` (the newest intact checkpoint in `run.dir`, if any), `required` (one must exist), `never`, or the path of
    a checkpoint, of this run or of another, from which this one begins (later starts resume from its own)."""
    initialize_from: PathText | None = None
    """begin at step 0 with only the weights of this checkpoint: of another run (or its folder: the newest intact one),
    or an imported one. Later starts resume from the run's own."""
    export_interval: AtLeastZero = 0
    """steps between exports into run.dir/exports, as Hugging Face folders (0: never)."""
    export_format: Literal["bf16", "fp32", "nvfp4", "nvfp4-compressed-tensors"] = "bf16"
    """of the exported weights, as in scripts/convert.py export-hf. NVFP4 needs a forward pass in NVFP4, so it is not
    possible after a switch."""
    allow_mismatch: bool = False
    """resume, or initialize, although data, tokenizer or model differ from the checkpoint's."""

    @model_validator(mode="after")
    def _exports(self) -> CheckpointConfig:
        if self.export_format != "bf16" and not self.export_interval:
            raise ValueError(f"export_format={self.export_format} does nothing without exports; give export_interval")
        return self


@dataclass(frozen=True, config=STRICT)
class ValidationConfig:
    """The loss of held-out text."""

    interval: AtLeastZero = 50
    """steps between validations (0: only at the end)."""
    num_samples: AtLeastOne | None = 32
    """sequences of each held-out set, spread evenly over it; null: all."""
    prompts: list[str] = field(default_factory=list)
    """texts that the model continues after each validation, into all records. An empty one begins a new document."""
    prompt_tokens: AtLeastOne = 64
    """the most tokens of a result."""

    @model_validator(mode="after")
    def _are_texts(self) -> ValidationConfig:
        for index, prompt in enumerate(self.prompts):
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise ValueError(f"prompts[{index}]={prompt!r} is not UTF-8; write it in that encoding")
        return self


@dataclass(frozen=True, config=STRICT)
class LoggingConfig:
    """What a run prints and records."""

    interval: AtLeastOne = 10
    """steps between printed lines; `metrics.jsonl` has every step."""
    tensorboard: bool = True
    """into run.dir/tensorboard."""
    wandb: Literal["online", "offline", "disabled"] = "disabled"
    """the project is WANDB_PROJECT, else megatron_fp4."""
    profile_steps: list[Integer] = field(default_factory=list)
    """first and last step (from 1) for torch's profiler on rank 0, such as `[11, 13]`. It writes into run.dir, on CUDA
    also the history of memory."""
    report: bool = True
    """write report.html when the run has finished."""
    report_minutes: NotNegative = 10.0
    """minutes between rewrites of report.html while the run trains; 0: none."""

    @model_validator(mode="after")
    def _has_a_window(self) -> LoggingConfig:
        steps = self.profile_steps
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ValueError(f"profile_steps={steps} is no window; give first and last step, such as [11,13], or []")
        return self


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """The mesh: world size = replicate x shard x expert x tensor. The shard axis gets the ranks that the others
    leave."""

    tensor: AtLeastOne = 1
    """tensor-parallel size."""
    sequence: bool | None = None
    """sequence parallelism between the layers (null: on if tensor > 1)."""
    expert: AtLeastOne = 1
    """expert-parallel size: so many ranks, which have other micro-batches, divide the experts among them."""
    replicate: AtLeastOne = 1
    """number of replicas of all shards (hybrid sharding)."""
    reshard: bool = False
    """`true`: free gathered parameters after every use (less memory); `false`: keep them for the whole step (less
    communication). Weights that are gathered as 4-bit codes are kept in any case."""
    reduce_gradients: Literal["once", "each"] = "once"
    """`once` a step (less communication; until then a rank keeps the FP32 gradients of its whole tensor-parallel slice)
    or in `each` micro-batch (a rank keeps those of its shard)."""
    reproducible: bool = False
    """the same bits on any power of two of data-parallel ranks, if kernels, `tensor` and the micro-batch size stay."""
    timeout_seconds: Seconds = 600
    """after which a hanging collective aborts the run; at half of it, the run prints which rank holds it up. Ranks also
    wait in a collective while the first rank tunes kernels. A section (a load, a save, a step) that stands still for
    nine tenths of it ends the run too, and so do loader workers that deliver nothing for four fifths."""
    gpu: Literal["h100", "h200", "b200", "gb200", "gb300", "rtx_pro_6000"] | None = None
    """the GPU that `run.dry=true` and `--check` plan for (null: an H100, or a B200 if `precision.backend` needs tensor
    cores for 4 bits; then memory has no limit)."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> ParallelConfig:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true has no effect with tensor=1; raise tensor, or leave sequence at null")
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes that have a key, by key, the innermost first."""
        return {axis.key: getattr(self, axis.key) for axis in reversed(AXES) if axis.key is not None}

    def axis_sizes(self, world_size: int) -> dict[Axis, int]:
        """The size of every axis, the outermost first; the one without a key is rounded down."""
        left = world_size // math.prod(self.sizes.values())
        return {axis: left if axis.key is None else self.sizes[axis.key] for axis in AXES}

    def data_parallel_size(self, world_size: int) -> int:
        """The number of ranks, or groups of ranks, that have different data."""
        sizes = self.axis_sizes(world_size)
        return world_size // math.prod(size for axis, size in sizes.items() if "batch" not in axis.divides)

    def shards(self, world_size: int) -> int:
        """Into how many parts the rows of every parameter are divided."""
        return math.prod(size for axis, size in self.axis_sizes(world_size).items() if "rows" in axis.divides)


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """A run as a process: its folder, seed, device, checks and limits."""

    dir: PathText = "runs/default"
    """the folder for everything that the run writes."""
    seed: Seed = 1234
    """of initialization, stochastic rounding and, unless `data.seed` is set, data order."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto`: CUDA, if there is any."""
    deterministic: bool = True
    """use only deterministic kernels."""
    replay_interval: AtLeastZero = 0
    """steps between replays: each rank computes one micro-batch twice; another bit ends the run. 0: never."""
    replicas_interval: AtLeastZero = 100
    """steps between comparisons of what ranks hold alike (0: never), also before saves; a difference ends the run."""
    max_minutes: NotNegative = 0.0
    """stop, with a checkpoint, after the first step that ends this long after the process began (0: no limit)."""
    dry: bool = False
    """only print what the run would need on WORLD_SIZE ranks (memory, messages, time)."""
    dry_mfu: PositiveShare = 0.55
    """assumed for the time: the share of its BF16 peak that one GPU reaches in BF16 training (H200: 0.56)."""
    dry_ranks_per_host: AtLeastOne = 8
    """assumed for the time of messages: ranks on one host."""

    @model_validator(mode="after")
    def _repeats(self) -> RunConfig:
        if self.replay_interval and not self.deterministic:
            raise ValueError(
                f"replay_interval={self.replay_interval} compares bits, which differ with deterministic=false; set "
                "deterministic=true, or replay_interval=0"
            )
        return self


@dataclass(frozen=True, config=STRICT)
class Config:
    """The whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    spikes: SpikesConfig = field(default_factory=SpikesConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    after_switch: PrecisionConfig | None = None
    """the precision that `precision.switch.target` names, resolved for this model; None with
    `precision.switch.when=never`. A user cannot set it: `compose` fills it in."""
    from_environment: dict[str, str] = field(default_factory=dict)
    """key -> text, such as `${oc.env:SCRATCH}/runs`, for values that depend on an environment variable. Files get the
    text instead of the value (config/compose.py). A user cannot set it either."""

    @property
    def data_seed(self) -> int:
        """The seed of the order of samples."""
        return self.run.seed if self.data.seed is None else self.data.seed
