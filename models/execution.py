"""How a model computes what it computes: which kernels, and what it computes again in the backward pass.

Nothing here changes what is trained. The PyTorch path (`PLAIN`) runs anywhere and is the reference; the fused
path differs from it by roundings to BF16.

    part                    torch                     fused (CUDA)
    Mamba-2's scan          models/ssd.py, FP32       mamba-ssm, BF16 in and out, FP32 sums and states
    Mamba-2's convolution   models/conv.py, FP32      causal-conv1d, BF16 in and out
    attention               PyTorch's own choice      cuDNN, else FlashAttention, ...
    norms, squared ReLU,    eager                     torch.compile of the small pure functions
    RoPE
    softmax of the loss     eager                     Triton, in place

With deterministic algorithms (`run.deterministic`), attention is FlashAttention's on CUDA in both columns.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from megatron_fp4.config.schema import ConfigError, ModelConfig, TrainConfig

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Execution:
    """The choices, one field a part.

    scan: mamba-ssm's kernels for the scan. conv: causal-conv1d's kernel. compiled: the small pure functions (norms,
    squared ReLU, RoPE) go through torch.compile, attention prefers cuDNN, and the loss's softmax is Triton's.
    recompute: `none`, `block` (a block keeps only its input) or `selective` (it keeps its input and what its GEMMs and
    attention return; see models/recompute.py).
    """

    scan: bool = False
    conv: bool = False
    compiled: bool = False
    recompute: str = "none"

    def pure(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, compiled if this execution compiles. It must depend on nothing but its arguments."""
        return _compiled(function) if self.compiled else function

    def describe(self, pattern: str) -> str:
        """One line for the log: what runs for the blocks in `pattern`."""
        parts = []
        if "M" in pattern:
            parts.append(f"scan: {'mamba-ssm' if self.scan else 'torch'}")
            parts.append(f"convolution: {'causal-conv1d' if self.conv else 'torch'}")
        if "*" in pattern:
            parts.append(f"attention: SDPA, {_attention(self.compiled)}")
        parts.append(f"norms and activations: {'torch.compile' if self.compiled else 'torch'}")
        parts.append(f"loss: {'Triton' if self.compiled else 'torch'}")
        return ", ".join(parts)


PLAIN = Execution()


def choose_execution(
    train: TrainConfig, model: ModelConfig, tensor_parallel: int, device_type: str, compute_dtype: str
) -> Execution:
    """The execution for `train.kernels` and `train.activation_checkpointing`.

    `torch` is the reference path. `fused` needs CUDA, BF16, Triton and, for Mamba-2 blocks, both packages. `auto` is
    `fused` on CUDA with BF16, as far as what it needs is installed and takes the model's sizes, and `torch` elsewhere.
    Raises ConfigError for `fused` where it cannot run.
    """
    recompute = train.activation_checkpointing
    if train.kernels == "torch":
        return Execution(recompute=recompute)
    refusals = {
        "scan": _scan_unavailable(model) if "M" in model.pattern else "there are no Mamba-2 blocks",
        "conv": _conv_unavailable(model, tensor_parallel) if "M" in model.pattern else "there are no Mamba-2 blocks",
        "compiled": None if _installed("triton") else "needs Triton: pip install triton",
    }
    general = None
    if device_type != "cuda":
        general = f"needs CUDA, and this run is on {device_type}"
    elif compute_dtype != "bfloat16":
        general = f"computes in BF16, and precision.compute_dtype={compute_dtype}"
    if train.kernels == "fused":
        needed = refusals if "M" in model.pattern else {"compiled": refusals["compiled"]}
        for refusal in (general, *needed.values()):
            if refusal is not None:
                raise ConfigError(f"train.kernels=fused {refusal}; or use auto or torch")
    if general is not None:
        return Execution(recompute=recompute)
    return Execution(recompute=recompute, **{part: refusal is None for part, refusal in refusals.items()})


def agreed_execution(execution: Execution) -> Execution:
    """`execution`, if all ranks chose alike; a collective. Raises ConfigError if they did not."""
    executions: list[Execution] = [execution] * dist.get_world_size()
    dist.all_gather_object(executions, execution)
    for part in ("scan", "conv", "compiled"):
        values = [getattr(chosen, part) for chosen in executions]
        others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
        if others:
            raise ConfigError(
                f"train.kernels=auto: the fused part `{part}` is {'' if values[0] else 'not '}used on rank 0, unlike "
                f"on rank {', '.join(others)}; install the same packages on all machines, or choose train.kernels=torch"
            )
    return execution


def _scan_unavailable(model: ModelConfig) -> str | None:
    if not _installed("mamba_ssm"):
        return "needs mamba-ssm for Mamba-2's scan: pip install --no-build-isolation mamba-ssm"
    size = model.mamba_chunk_size
    if size < 16 or size & (size - 1):
        return f"needs model.mamba_chunk_size to be a power of two from 16 on, and it is {size}"
    return None


def _conv_unavailable(model: ModelConfig, tensor_parallel: int) -> str | None:
    if not _installed("causal_conv1d"):
        return "needs causal-conv1d for Mamba-2's convolution: pip install --no-build-isolation causal-conv1d"
    if not 2 <= model.mamba_conv_width <= 4:
        return f"needs model.mamba_conv_width to be 2, 3 or 4, and it is {model.mamba_conv_width}"
    channels = (model.mamba_inner_dim + 2 * model.mamba_num_groups * model.mamba_state_dim) // tensor_parallel
    if channels % 8:
        return f"needs a multiple of 8 channels a rank in the convolution, and this model has {channels}"
    return None


def _attention(compiled: bool) -> str:
    if torch.are_deterministic_algorithms_enabled() and torch.cuda.is_available():
        return "Flash (deterministic)"
    return "cuDNN, else Flash" if compiled else "its own choice"


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    # Shapes are those of one micro-batch for the whole run; compiled for any shape the kernels would be slower.
    return torch.compile(function, dynamic=False)
