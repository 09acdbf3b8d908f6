"""The configuration of a run, as frozen dataclasses that every room may read.

The classes check themselves: a mistyped key, a value of the wrong type, an unknown choice or a number out of its range
cannot be constructed, nor a section whose values do not go together. `compose.py` makes one `Config` of the YAML files
under `configs/` and the command line, and `checks.py` refuses combinations that cannot run. Below `pretrain.py` no
OmegaConf object exists.

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

# Fields of a `Config` that are no keys: composing fills them in.
ADDED = ("after_switch", "from_environment")


class ConfigError(ValueError):
    """What a user got wrong in the configuration: one line that names the key, the value and the remedy."""


@dataclass(frozen=True, config=STRICT)
class Bf16BlocksDefault:
    """How many blocks at each end, in characters of the pattern, a recipe leaves in BF16 (paper, appendix A).

    first, last: blocks at the beginning and at the end.
    """

    first: AtLeastZero = 0
    last: AtLeastZero = 0


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """A stack of blocks, sizes in elements.

    name: shown in logs, and that of an exported model.
    pattern: the blocks, a letter each: `M` Mamba-2, `*` attention, `-` FFN (models/pattern.py has the table).
    vocab_size: rows of the embedding and the head; the tokenizer's largest id plus one, or more.
    hidden_dim: of the residual stream. ffn_dim: of the FFN's inner layer, whose activation is a squared ReLU.
    num_query_heads, num_kv_heads, head_dim: of attention; groups of query heads share a KV head.
    rope: rotary positions in attention; without, attention knows of positions by the mask and the Mamba-2 blocks alone.
        rope_base: their base.
    mamba_num_heads, mamba_head_dim: of Mamba-2; their product is its inner width. mamba_num_groups: of B and C, whose
        heads share them. mamba_state_dim: of a head's state. mamba_conv_width: taps of its convolution.
    mamba_chunk_size: tokens of a chunk of the scan: how it is computed, not what.
    norm_eps: of RMS norms. init_std: of initial weights.
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
class PhaseConfig:
    """A span of training with one blend.

    name: shown in tables and logs; a checkpoint knows a phase by it.
    fraction, steps, tokens: its length, at most one of them, a fraction of the run's steps; one phase may have none and
        gets the rest. Boundaries are whole steps.
    blend: source name -> weight, or `tokens`: all sources, weighted by the tokens that they have.
    global_batch_size, sequence_length: where they are not `train`'s. Shorter sequences are pieces of those of
        `train.sequence_length` tokens, so a step has as many tokens.
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

    split: `--split`, such as `[949,50,1]`: training takes the first share, and without `data.validation` the second one
        is held out. null: all, as with `--train-data-path`.
    train_samples: `--train-samples`, or `--train-iters` times `--global-batch-size`, on which the order depends. null:
        up to the end of this run.
    consumed_samples: how many of them Megatron has trained on (with `transitions`, in its last phase); this run begins
        after them.
    phases: `transitions`: each has an order of its own, as with `--phase-transition-iterations`; `relaunched`: that of
        its blend over the whole run, as when Megatron was started with another `--data-path`.
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
    cache_dir: keeps the built-in corpus, indices of `data.order=megatron` and (in `remote`) blocks of URLs; null: the
        user's cache directory.
    sources, validation: name -> what it is read from (`indexed` only): the path of a `.bin`/`.idx` pair without the
        ending, a pattern (`/data/web_*`), a URL (`s3://bucket/web`), a `.yaml` file with a list of these, or a list.
    tokenizer: a `tokenizer.json`, a folder with one, a SentencePiece `.model`, or a `.tiktoken` rank file (`indexed`
        only; optional, its fingerprint goes into checkpoints).
    eod_token: that tokenizer's end-of-document token; null means what the tokenizer says, else `<|endoftext|>`.
    order: of samples: `documents` (documents are shuffled, anew in each epoch, and then cut into samples), `windows`
        (the files are cut as they lie, and the cuts shuffled) or `megatron` (Megatron-core's, which `megatron`
        describes; its indices are kept in cache_dir).
    seed: of that order, where `run.seed` is for everything else; null means `run.seed`.
    megatron: the run that `data.order=megatron` continues.
    phases: spans of the run, each with its own blend of sources; their lengths add up to the run.
    max_epochs: how often the run may go through a source, as one number for all or by source; null: as often as it
        takes. A run that would exceed it does not start.
    documents: `joined` (a sample's documents see each other) or `masked` (no token sees another document, by attention
        or by Mamba-2's state).
    boundary_loss: with `masked`, whether a target counts that belongs to another document than the token before it.
    num_workers: loader processes per rank, which prepare the micro-batches of two steps ahead; 0 for none.
    blends: named blends that the phases of an experiment refer to, as in `blend: ${data.blends.first}`. A file of yours
        in configs/data gives them (docs/quickstart.md has one).
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


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """The batch arithmetic, and how a step is computed: tokens of a step = global_batch_size * sequence_length.

    steps: of the whole run, what a resumed run has done included.
    global_batch_size: sequences of a step over all ranks. micro_batch_size: sequences that a rank computes at once; the
        gradients of a step's micro-batches add up.
    sequence_length: tokens of a sequence.
    max_skipped_steps: a step whose loss or gradient norm is not finite is skipped; so many in a row end the run.
    kernels: `torch` (plain PyTorch, the reference), `fused` (CUDA with BF16: mamba-ssm, causal-conv1d, cuDNN attention,
        compiled norms and activations) or `auto` (fused on CUDA as far as packages are installed).
    activation_checkpointing: `none`, `block` (keep only each block's input and compute it again in the backward pass)
        or `selective` (keep what GEMMs and attention return, compute norms, activations, convolution and scan again).
        In BF16, gradients have the same bits in all three.
    cuda_graphs: forward and backward of a micro-batch are captured once and replayed, with the same bits in less of the
        host's time: `true`, `false`, or `auto`: on one data-parallel rank, where they can be.
    """

    steps: AtLeastOne = 300
    global_batch_size: AtLeastOne = 8
    micro_batch_size: AtLeastOne = 4
    sequence_length: SequenceLength = 256
    max_skipped_steps: AtLeastOne = 10
    kernels: Literal["auto", "torch", "fused"] = "auto"
    activation_checkpointing: Literal["none", "block", "selective"] = "none"
    cuda_graphs: AutoSwitch = "auto"


@dataclass(frozen=True, config=STRICT)
class SpikesConfig:
    """Steps whose loss or gradient norm lies far above what the steps before had (training/callbacks/bad_steps.py has
    the rule).

    action: `none`; `skip` (no update with that batch); `rollback` (back to the last checkpoint's weights and moments,
        and on with the next batch: the data since then is skipped).
    threshold: in robust standard deviations above the median. window: accepted steps that it is taken over; half as
        many, in the same data phase and precision, must come before a spike.
    max_in_row: so many spikes in a row, of rollbacks those to one checkpoint, end the run with a diagnosis.
    """

    action: Literal["none", "skip", "rollback"] = "none"
    threshold: Positive = 6.0
    window: AtLeastOne = 128
    max_in_row: AtLeastOne = 5


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """AdamW; 1-D parameters and biases are not decayed.

    lr: the peak learning rate. beta1, beta2, eps: of Adam. weight_decay: decoupled, multiplied with the learning rate.
    clip_norm: the gradient's norm over all parameters is scaled down to it; 0: never.
    """

    lr: LearningRate = 2e-3
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip_norm: NotNegative = 1.0


@dataclass(frozen=True, config=STRICT)
class ScheduleConfig:
    """Warm-up from zero, constant, decay.

    warmup_fraction, decay_fraction: of `train.steps`, at its beginning and its end. min_lr_ratio: final over peak
        learning rate.
    decay: `linear`, `cosine`, `exponential` or `1-sqrt`.
    """

    warmup_fraction: Share = 0.02
    decay_fraction: Share = 0.15
    decay: Literal["linear", "cosine", "1-sqrt", "exponential"] = "linear"
    min_lr_ratio: Share = 0.01


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """interval: steps between checkpoints (0: only the final one). keep: how many to keep (0: all).

    asynchronous: training continues during a save, of a copy in host memory; `false`: it waits. A save that fails is
        tried again, then left out; three in a row end the run.
    resume: `auto` (the newest intact checkpoint of `run.dir`, if any), `required` (the same, and one must be there),
        `never`, or the path of a checkpoint of another run, from which this one begins (its own go first on later
        starts), or of this one, to go back to.
    initialize_from: begin at step 0 with the weights alone of this checkpoint: of another run (or its folder: the
        newest intact one), or an imported one. Later starts resume the run's own.
    export_interval: every so many steps (0: never) a checkpoint is made and exported into run.dir/exports, as a Hugging
        Face folder.
    export_format: of these folders' weights, as scripts/convert.py export-hf has them; NVFP4 (of ModelOpt or
        compressed-tensors) only of checkpoints whose forward pass has it, not after a switch that ends it.
    allow_mismatch: resume, or initialize, although data, tokenizer or model differ from what the checkpoint was made
        with. Tensors of other shapes cannot be loaded.
    """

    interval: AtLeastZero = 100
    keep: AtLeastZero = 3
    asynchronous: bool = True
    resume: PathText = "auto"
    initialize_from: PathText | None = None
    export_interval: AtLeastZero = 0
    export_format: Literal["bf16", "fp32", "nvfp4", "nvfp4-compressed-tensors"] = "bf16"
    allow_mismatch: bool = False

    @model_validator(mode="after")
    def _exports(self) -> CheckpointConfig:
        if self.export_format != "bf16" and not self.export_interval:
            raise ValueError(f"export_format={self.export_format} does nothing without exports; give export_interval")
        return self


@dataclass(frozen=True, config=STRICT)
class ValidationConfig:
    """interval: steps between validations (0: only at the end).

    num_samples: held-out sequences of each set, spread evenly over it; null: all that it has.
    prompts: texts that the model continues after each validation: into the log, metrics.jsonl, TensorBoard and wandb.
        An empty one begins a new document. prompt_tokens: at most so many tokens each.
    """

    interval: AtLeastZero = 50
    num_samples: AtLeastOne | None = 32
    prompts: list[str] = field(default_factory=list)
    prompt_tokens: AtLeastOne = 64

    @model_validator(mode="after")
    def _are_texts(self) -> ValidationConfig:
        for index, prompt in enumerate(self.prompts):
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise ValueError(f"prompts[{index}]={prompt!r} is not UTF-8; write it in that encoding")
        return self


@dataclass(frozen=True, config=STRICT)
class LoggingConfig:
    """interval: steps between printed lines; `metrics.jsonl` has every step. tensorboard: into run.dir/tensorboard.

    wandb: `online`, `offline`, `disabled`; of the project that WANDB_PROJECT names, else megatron_fp4.
    profile_steps: first and last step, counted from 1, of a torch profiler window on rank 0, such as `[11, 13]`, which
        writes into run.dir, on CUDA with the history of memory; empty: none.
    baseline: the folder of another run, or `name=folder`, which loss.png and report.html show beside this one, with the
        gap to it (null: none). report: write report.html, a page about the run, when it has finished.
    """

    interval: AtLeastOne = 10
    tensorboard: bool = True
    wandb: Literal["online", "offline", "disabled"] = "disabled"
    profile_steps: list[Integer] = field(default_factory=list)
    baseline: PathText | None = None
    report: bool = True

    @model_validator(mode="after")
    def _has_a_window(self) -> LoggingConfig:
        steps = self.profile_steps
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ValueError(
                f"profile_steps={steps} is no window; give its first and last step, such as [11,13], or []"
            )
        return self


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """The mesh: world size = replicate x shard x tensor, the shard axis being what is left over.

    tensor: tensor-parallel size. sequence: sequence parallelism between the layers (null: on when tensor > 1).
    replicate: number of FSDP replicas (hybrid sharding). reshard: free gathered parameters after every use
    (`true`, less memory) or keep them for the whole step (`false`, less communication); 4-bit codes, as which weights
    are gathered that nothing else needs, are kept in any case.
    reduce_gradients: over the shards, `once` a step (less communication; until then each rank holds the FP32 gradients
    of its whole tensor-parallel slice) or after `each` micro-batch (only of its shard).
    reproducible: the same bits on any power of two of data-parallel ranks: gradients are summed in an order that does
    not depend on their number (parallel/reproducible.py). The kernels, `tensor` and the micro-batch size must stay.
    timeout_seconds: after which a hanging collective aborts the run; at half of it the run says which rank holds it up.
    Ranks also wait in one while the first tunes kernels. Loader workers that deliver nothing for four fifths of it end
    the run too.
    gpu: which GPU `run.dry=true` and `--check` plan for (null: an H100, or a B200 where `precision.backend` asks for
    tensor cores for 4 bits; memory without a limit).
    """

    tensor: AtLeastOne = 1
    sequence: bool | None = None
    replicate: AtLeastOne = 1
    reshard: bool = False
    reduce_gradients: Literal["once", "each"] = "once"
    reproducible: bool = False
    timeout_seconds: Seconds = 600
    gpu: Literal["h100", "h200", "b200", "gb200", "gb300", "rtx_pro_6000"] | None = None

    @model_validator(mode="after")
    def _has_an_effect(self) -> ParallelConfig:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true has no effect with tensor=1; raise tensor, or leave sequence at null")
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of a given size by their keys, the innermost first; shards lie between `tensor` and the others."""
        return {"tensor": self.tensor, "replicate": self.replicate}

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that see different data: all that are not tensor-parallel partners of each other."""
        return world_size // self.tensor

    def shards(self, world_size: int) -> int:
        """What is left over of `world_size`, rounded down."""
        return world_size // math.prod(self.sizes.values())


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """dir: everything the run writes. seed: of initialization, stochastic rounding and, unless `data.seed` is given,
        data order.

    device: `auto` (CUDA if there is any), `cuda` or `cpu`. deterministic: deterministic kernels only.
    replay_interval: every so many steps (0: never) each rank computes one micro-batch twice and compares every bit; a
        difference ends the run.
    replicas_interval: every so many steps (0: never), and before each checkpoint, ranks compare what they should hold
        alike; a difference ends the run.
    dry: only print what the run would need on WORLD_SIZE ranks (memory, messages, time), computed in this process.
    dry_mfu: what its time assumes: the share of the BF16 peak of `parallel.gpu` that training in BF16 reaches on one
        GPU (measured: 0.56 on an H200).
    dry_ranks_per_host: ranks that share a host, which decides how fast their messages are planned to be.
    max_minutes: stop, with a checkpoint, after the first step that ends so long after the process began (0: no limit);
        that step and the checkpoint take their time beyond it.
    """

    dir: PathText = "runs/default"
    seed: Seed = 1234
    device: Literal["auto", "cuda", "cpu"] = "auto"
    deterministic: bool = True
    replay_interval: AtLeastZero = 0
    replicas_interval: AtLeastZero = 100
    max_minutes: NotNegative = 0.0
    dry: bool = False
    dry_mfu: PositiveShare = 0.55
    dry_ranks_per_host: AtLeastOne = 8

    @model_validator(mode="after")
    def _repeats(self) -> RunConfig:
        if self.replay_interval and not self.deterministic:
            raise ValueError(
                f"replay_interval={self.replay_interval} compares bits, which deterministic=false does not repeat; set "
                "deterministic=true, or replay_interval=0"
            )
        return self


@dataclass(frozen=True, config=STRICT)
class Config:
    """The whole run.

    after_switch: the precision that `precision.switch.target` names, as it resolves for this model; None with
        `precision.switch.when=never`. No key of its own: `compose` fills it.
    from_environment: key -> its text, such as `${oc.env:SCRATCH}/runs`, where an environment variable has a part in the
        value; it stands in everything that is written instead of the value (config/compose.py). No key either.
    """

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
    from_environment: dict[str, str] = field(default_factory=dict)

    @property
    def data_seed(self) -> int:
        """The seed of the order of samples."""
        return self.run.seed if self.data.seed is None else self.data.seed
