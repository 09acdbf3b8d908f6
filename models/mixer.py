"""What a block h + mixer(norm(h)) consists of: its norm, and what the rest of the program asks its mixer.

A block type is a subclass of `Mixer` in a file of its own, and a row in the table of `models/pattern.py`; no other file
names it. Class methods answer from the configuration alone, before anything is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fp4.config.schema import ConfigError, ModelConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import local_parameter, new_parameter
from megatron_fp4.precision.plan import LinearShape
from models.execution import PLAIN, Execution, FusedKernel
from models.initialization import Rule, ones
from models.positions import Documents, NewTokens


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467, eq. 4).

    Computed in the dtype of `weight` (FP32), returned in that of `x`.
    """
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """RMS norm with a weight that every tensor-parallel rank holds whole.

    With sequence parallelism each rank sees its own tokens only, so the weight's gradient is a partial sum.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        mesh: ParallelMesh,
        execution: Execution = PLAIN,
        formula: Callable[..., Tensor] = rms_norm,
        shard_dim: int | None = None,
    ) -> None:
        """formula: of tensors, the FP32 weight and eps. shard_dim: over tensor-parallel ranks."""
        super().__init__()
        self.eps = eps
        self.weight = new_parameter((dim,), mesh, shard_dim)
        self._norm = execution.pure(formula)

    def initial_values(self) -> dict[str, Rule]:
        return {"weight": ones}

    def local_weight(self) -> Tensor:
        """FP32 [dim] of this rank, for `function`."""
        return local_parameter(self.weight)

    def function(self, *tensors: Tensor) -> Tensor:
        """`forward` as a function of tensors alone: its own, then the weight."""
        return self._norm(*tensors, self.eps)

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors, self.local_weight())


class Mixer(nn.Module, ABC):
    """[tokens, hidden] -> [tokens, hidden], by some linears (parallel/layers.py) and what lies between them.

    name: as people call it. fused: kernels that can take the place of its functions in plain PyTorch.
    """

    name: ClassVar[str]
    fused: ClassVar[tuple[FusedKernel, ...]] = ()

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__()
        self.execution = execution

    @abstractmethod
    def forward(self, x_td: Tensor, sequence_length: int, documents: Documents | None = None) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], each sequence of `sequence_length` tokens on its own.

        documents: where no token is to see another document than its own, which these are; None: a sequence is one
        document.
        """

    @abstractmethod
    def new_cache(self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype) -> Any:
        """What `decode` keeps of the tokens before, for `batch` texts that have none yet; None if nothing.

        max_length: no text will be longer, in tokens. dtype: the compute dtype.
        """

    @abstractmethod
    def decode(self, x_td: Tensor, cache: Any, new: NewTokens) -> Tensor:
        """`forward` of tokens that continue the texts in `cache`, which then holds them too. No gradients.

        [tokens, hidden] -> [tokens, hidden], tokens = batch * new.length. Whatever lies between the linears is computed
        by the functions in plain PyTorch, on any device: shapes change from call to call.
        """

    @classmethod
    @abstractmethod
    def check(cls, config: ModelConfig) -> None:
        """Raise ConfigError for sizes that do not go together."""

    @classmethod
    @abstractmethod
    def shared_by_tensor_ranks(cls, config: ModelConfig) -> dict[str, tuple[int, int]]:
        """Key -> (what tensor-parallel ranks divide among them, the key's value)."""

    @classmethod
    @abstractmethod
    def linears(cls, config: ModelConfig) -> Sequence[LinearShape]:
        """In order of execution; `name` is that of the mixer's attribute."""

    @classmethod
    def flops_per_token(cls, config: ModelConfig, sequence_length: int) -> int:
        """Model FLOPs of the forward pass besides the linears'."""
        return 0

    @classmethod
    def other_parameters(cls, config: ModelConfig) -> int:
        """Number of parameters besides the linears'."""
        return 0

    @classmethod
    def describe_kernels(cls, execution: Execution, masked: bool) -> list[str]:
        """For the log: which kernel computes what. masked: whether documents are."""
        return [f"{k.title}: {k.package if k.part in execution.kernels else 'torch'}" for k in cls.fused]

    def fp32_units(self) -> list[nn.Module]:
        """Modules whose parameters must stay FP32 in the forward pass."""
        return []

    @property
    def autotuned(self) -> bool:
        """Whether some kernel here measures, when it first runs, how it runs fastest."""
        return False

    def rehearse(
        self, batch: int, sequence_length: int, compute_dtype: torch.dtype, device: torch.device, masked: bool = False
    ) -> None:
        """Run the autotuned kernels forward and backward on constants, in the shapes and dtypes that the run will have.

        masked: whether the run masks documents. Needs no parameters, changes nothing, draws nothing.
        """


def check_multiple(config: ModelConfig, name: str, of: str) -> None:
    """Raise ConfigError unless `model.<name>` is a multiple of `model.<of>`."""
    size, divisor = getattr(config, name), getattr(config, of)
    if size % divisor:
        works = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
        raise ConfigError(f"model.{name}={size} is not a multiple of model.{of}={divisor}; use one of {works}")


def input_projection(name: str, config: ModelConfig, out_features: int, groups: int = 1) -> LinearShape:
    """A mixer's first linear, which reads the hidden state; its outputs are sharded over tensor-parallel ranks.

    groups: equal groups of outputs that stay together.
    """
    title, key = "the projections into every block", "model.hidden_dim"
    return LinearShape(name, 0, config.hidden_dim, out_features, input_key=key, title=title, groups=groups)


def output_projection(name: str, config: ModelConfig, in_features: int, input_key: str, title: str) -> LinearShape:
    """A mixer's last linear, which writes to the hidden state; its inputs are sharded over tensor-parallel ranks."""
    hidden = config.hidden_dim
    return LinearShape(name, 0, in_features, hidden, input_key=input_key, input_sharded=True, title=title)


def group_major_order(section_rows: Sequence[int], num_groups: int) -> Tensor:
    """The rows of a packed projection: ours by group, published checkpoints by section. int64 [rows], with

        ours = published[order]             published = ours[order.argsort()]

    Published weights stack their sections: `[q | k | v]`, Mamba-2's `[z | x | B | C | dt]`. Ours put together what
    belongs to one group (a KV head with its query heads; a state group with its heads), as
    `[q_0 | k_0 | v_0 | q_1 | k_1 | ...]`: an even split over tensor-parallel ranks then gives every rank whole groups,
    at any tensor-parallel size. Every section divides into `num_groups`.
    """
    sections = torch.arange(sum(section_rows)).split(list(section_rows))
    return torch.cat([section.view(num_groups, -1) for section in sections], 1).flatten()
