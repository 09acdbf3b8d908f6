"""How a model computes what it computes: which kernels, and what it computes again in the backward pass.

Nothing here changes what is trained. The PyTorch path (`PLAIN`) runs anywhere and is the reference; the fused
path differs from it by roundings to BF16.

    part                    torch                     fused (CUDA)
    Mamba-2's scan          models/ssd.py, FP32       mamba-ssm, BF16 in and out, FP32 sums and states
    Mamba-2's convolution   models/conv.py, FP32      causal-conv1d, BF16 in and out
    attention               PyTorch's own choice      cuDNN, else FlashAttention, ...
      deterministic           FlashAttention            cuDNN's forward pass, Triton's backward pass
      within documents        its choice, with a mask   Triton, else FlashAttention of variable length
    norms, squared ReLU,    eager                     torch.compile of the small pure functions
    RoPE
    softmax of the loss     eager                     Triton, in place

Where the Triton kernels of attention do not take a model (models/tiled_attention.py), deterministic attention is
FlashAttention's in the right column too. `models/execution_choice.py` chooses for a configuration and a machine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from megatron_fp4.config.schema import ModelConfig
from models.recompute import cheap

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class FusedKernel:
    """A kernel of another package that can take the place of a function in plain PyTorch.

    part: what it computes, the name under which a mixer asks for it; title: the same in words. package: as pip knows
    it. refusal: why it does not take a model's sizes at a tensor-parallel size, or None. optional: whether another
    fused kernel takes its place then, so that `train.kernels=fused` goes without it.
    """

    part: str
    title: str
    package: str
    function: Callable[..., Any]
    refusal: Callable[[ModelConfig, int], str | None]
    optional: bool = False


@dataclass(frozen=True)
class Execution:
    """The choices. Everything in it can be pickled, for ranks to compare theirs.

    kernels: part -> what computes it in place of the function in plain PyTorch, with the same arguments: `scan` and
    `conv` of Mamba-2, `attention`, `loss`. (A dry run puts functions here that only allocate.)
    compile: makes one kernel of a small pure function (norms, squared ReLU, RoPE), such as `torch_compile`; with it,
    attention prefers cuDNN and the loss's softmax is Triton's. None: such functions run as they are.
    recompute: `none`, `block` (a block keeps only its input) or `selective` (it keeps its input and what its GEMMs and
    attention return; see models/recompute.py).
    """

    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    recompute: str = "none"

    @property
    def compiled(self) -> bool:
        """Whether small pure functions are compiled."""
        return self.compile is not None

    def kernel(self, part: str, plain: Callable[P, R]) -> Callable[P, R]:
        """What computes `part`: the kernel if there is one, else `plain`."""
        return self.kernels.get(part, plain)

    def pure(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, compiled if this execution compiles. It must depend on nothing but its arguments."""
        return function if self.compile is None else self.compile(function)

    def cheap(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, computed again in the backward pass if recomputation is selective (models/recompute.py).

        It must depend on nothing but its arguments, which are tensors and constants, and return tensors.
        """
        return cheap(function) if self.recompute == "selective" else function


PLAIN = Execution()

COMPILERS = 8
"""Processes of one rank that compile what torch.compile makes, at most; a model has some fifteen such kernels."""


@functools.cache
def torch_compile(function: Callable[P, R]) -> Callable[P, R]:
    """`function` through torch.compile; the same one every time."""
    _share_cores()
    # Shapes are those of one micro-batch for the whole run; compiled for any shape the kernels would be slower.
    return torch.compile(function, dynamic=False)


def _share_cores() -> None:
    """The ranks of a machine share its cores: each would start as many compilers as there are cores, or 32."""
    from torch._inductor import config

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        config.compile_threads = min(max(cores, 1), COMPILERS)
