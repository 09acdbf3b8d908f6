"""The group `precision` of the configuration: how GEMM operands are quantized, by which backend, and the switch."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from megatron_fp4.config.types import STRICT, AtLeastOne, AtLeastZero, FourOverSix, PathText, Positive

TransformSize = Literal[0, 2, 4, 8, 16, 32, 64, 128]
# In a precision's name, between the name of its file and the values that differ from the file.
WITH = " with "


@dataclass(frozen=True, config=STRICT)
class OperandConfig:
    """How one GEMM operand is quantized."""

    format: str = "bf16"
    """`bf16` (not quantized), `nvfp4`, `mxfp4`, `mxfp8`, `fp8`, or a member of the family in quantization/family.py: an
    element, a block scale and what shares an FP32 scale, such as `e2m1_e5m2`, `e2m1_e4m3_row` or `e4m3_tensor`."""
    block: str = "1x16"
    """elements that share a scale, rows x columns with the columns along the dot product, such as `1x16` or `16x16`;
    FORMATS in quantization/formats.py has those of each format. Ignored for `bf16` and where no block has a scale."""
    rounding: Literal["nearest", "stochastic", "ms_eden"] = "nearest"
    """`nearest`, or `stochastic` if the format has it; for nvfp4 operands of dgrad and wgrad also `ms_eden` (Quartet
    II, arXiv 2601.22813), with `rht: 128` in its GEMM and `rht_signs: fresh`."""
    four_over_six: FourOverSix = "none"
    """nvfp4 only: map a block's largest value to 4 instead of 6 where the sum of `absolute` (also `true`) or `squared`
    errors is then smaller."""


@dataclass(frozen=True, config=STRICT)
class SecondOperandConfig(OperandConfig):
    """How dgrad's weight and wgrad's activation are quantized, two tensors that fprop has quantized before."""

    source: Literal["tensor", "forward", "codes"] = "tensor"
    """quantize the `tensor`, or the transposed values of fprop's codes (`forward`; only codes are then kept), or use
    fprop's `codes`, although their scales are along another dot product (paper, Fig. 14; emulated backend only)."""


@dataclass(frozen=True, config=STRICT)
class FpropConfig:
    """y = x W^T."""

    activation: OperandConfig = field(default_factory=OperandConfig)
    weight: OperandConfig = field(default_factory=OperandConfig)
    """its operands x and W."""
    rht: TransformSize = 0
    """size of the random Hadamard transform of both, 0 for none."""


@dataclass(frozen=True, config=STRICT)
class DgradConfig:
    """dx = dy W."""

    gradient: OperandConfig = field(default_factory=OperandConfig)
    weight: SecondOperandConfig = field(default_factory=SecondOperandConfig)
    """its operands dy and W."""
    rht: TransformSize = 0
    """size of the random Hadamard transform of both, 0 for none."""


@dataclass(frozen=True, config=STRICT)
class WgradConfig:
    """dW = dy^T x."""

    gradient: OperandConfig = field(default_factory=OperandConfig)
    activation: SecondOperandConfig = field(default_factory=SecondOperandConfig)
    """its operands dy and x."""
    rht: TransformSize = 0
    """size of the random Hadamard transform of both, 0 for none."""


@dataclass(frozen=True, config=STRICT)
class Bf16BlocksConfig:
    """Which linears stay in BF16 although the recipe is quantized."""

    first: AtLeastZero = 0
    last: AtLeastZero | None = 0
    """blocks counted from each end of the pattern; null: the last 15% of the blocks, rounded up."""
    names: list[str] = field(default_factory=list)
    """shell patterns (`*`, `?`, `[...]`) over the names of linears, such as `blocks.3.*` or `*.out_proj`."""
    file: PathText | None = None
    """a plan file (YAML with a list under `bf16`), such as `scripts/analyze_precision.py` writes."""

    def num_last(self, num_blocks: int) -> int:
        """`last` in a model of `num_blocks` blocks."""
        return -(-15 * num_blocks // 100) if self.last is None else self.last


@dataclass(frozen=True, config=STRICT)
class RecipeConfig:
    """The recipe of a linear's three GEMMs."""

    name: str = "bf16"
    """shown in the plan and the logs."""
    amax: Literal["global", "shard"] = "global"
    """tensor maxima are over the tensor-parallel group (`global`: codes do not depend on its size) or over each shard
    (Transformer Engine's way)."""
    rht_signs: Literal["fixed", "none", "fresh"] = "fixed"
    """one vector for the run (`fixed`), `none`, or a new one for every call (`fresh`)."""
    fp8_power_of_two_scales: bool = False
    """round the scales of fp8 operands down to powers of two, as Transformer Engine does by default."""
    fprop: FpropConfig = field(default_factory=FpropConfig)
    dgrad: DgradConfig = field(default_factory=DgradConfig)
    wgrad: WgradConfig = field(default_factory=WgradConfig)


@dataclass(frozen=True, config=STRICT)
class ExceptionConfig:
    """Linears with another recipe than the run's."""

    names: list[str] = field(default_factory=lambda: ["*"])
    """shell patterns over the names of linears, as in `bf16_blocks.names`; `head`: the output head, else in BF16."""
    blocks: str = ""
    """letters of `model.pattern`: only linears of these kinds of blocks. Empty: all kinds."""
    sections: list[str] = field(default_factory=list)
    """only these sections of packed projections (z, x, B, C, dt of `in_proj`; q, k, v of `qkv_proj`; gate, up of
    `gate_up_proj`), which become a linear of their own, as do the others. Empty: whole linears."""
    precision: str = "bf16"
    """the precision config with their recipe, a name under `configs/precision/`."""
    optional: bool = field(default=False, kw_only=True)
    """`true`: such blocks may lack such linears; else patterns that match nothing are refused."""


@dataclass(frozen=True, config=STRICT)
class ComposedException(ExceptionConfig):
    """An exception with its recipe. Composing the configuration turns every exception into one."""

    recipe: RecipeConfig = field(default_factory=RecipeConfig)


@dataclass(frozen=True, config=STRICT)
class SwitchConfig:
    """The change of plan during a run (paper, section 5 and appendix D)."""

    when: str = "never"
    """`never`; `before_decay` (the step at which the learning rate starts to decay); a fraction of the run such as
    `0.8`; a step such as `5000`; or `gradient_noise` (arXiv 2505.19115, section 4.1: the gradient norm fell below
    sqrt(3) times the norm of the quantization noise)."""
    scope: Literal["both", "forward", "backward"] = "both"
    """`both`, `forward` (fprop only) or `backward` (dgrad and wgrad; where dgrad's weights are no longer quantized,
    fprop's take 1x16 blocks)."""
    target: str = "bf16"
    """the precision config to switch to, a name under `configs/precision/`."""
    threshold: Positive = 1.7320508
    interval: AtLeastOne = 50
    """of `gradient_noise`: three measurements in a row below this ratio switch; the steps between them."""
    rewarm_steps: AtLeastZero = 0
    """steps over which the learning rate rises again from zero after the switch."""


@dataclass(frozen=True, config=STRICT)
class DiagnosticsConfig:
    """Measurements of quantization errors."""

    interval: AtLeastZero = 0
    """steps between measurements, from the first step on; 0: none."""


@dataclass(frozen=True, config=STRICT)
class PrecisionConfig(RecipeConfig):
    """The recipe of the linears, its exceptions, and the backend."""

    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """`float32` for comparisons of meshes and devices (emulated backend only)."""
    backend: Literal["auto", "emulated", "transformer_engine", "torch"] = "auto"
    """`auto`: transformer_engine or emulated (docs/numerics.md)."""
    sums: Literal["fp32", "blackwell"] = "fp32"
    """in which order emulated GEMMs add products: this machine's (`fp32`), or Blackwell's, bit for bit (NVFP4 only)."""
    recheck_interval: AtLeastZero = 0
    """steps between rechecks (0: never) of a quantized linear by the reference; a difference ends the run."""
    bf16_blocks: Bf16BlocksConfig = field(default_factory=Bf16BlocksConfig)
    exceptions: list[ExceptionConfig] = field(default_factory=list)
    """linears with another recipe. Of several that apply, the first counts, after `bf16_blocks`."""
    switch: SwitchConfig = field(default_factory=SwitchConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
