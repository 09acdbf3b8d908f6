"""The parts of a block h + mixer(norm(h)): RMS norm, and the interface of mixers.

A block type is a subclass of `Mixer` in its own file, and a row in the table of `models/pattern.py`; no other file
names it. Class methods need only the configuration, so they can be called before a model is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
from models.published import HuggingFaceBlock, MegatronBlock


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467, eq. 4).

    Computed in the dtype of `weight` (FP32), returned in the dtype of `x`.
    """
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """RMS norm. Its weight is replicated over tensor-parallel ranks, unless `shard_dim` is given.

    With sequence parallelism each rank has only its slice of the tokens, so the gradient of a replicated weight is a
    partial sum (training/step.py sums it).
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
        """formula: called with `forward`'s tensors, the FP32 weight and eps. shard_dim: for tensor-parallel ranks."""
        super().__init__()
        self.eps = eps
        self.weight = new_parameter((dim,), mesh, shard_dim)
        self._norm = execution.pure(formula)

    def initial_values(self) -> dict[str, Rule]:
        return {"weight": ones}

    def local_weight(self) -> Tensor:
        """This rank's part of the weight, FP32 [dim], for `function`."""
        return local_parameter(self.weight)

    def function(self, *tensors: Tensor) -> Tensor:
        """`forward` as a pure function, with `local_weight` as the last argument."""
        return self._norm(*tensors, self.eps)

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors, self.local_weight())


class Mixer(nn.Module, ABC):
    """[tokens, hidden] -> [tokens, hidden], by linears (parallel/layers.py) and functions between them.

    name: for messages. fused: kernels that can replace its functions in plain PyTorch. hugging_face, megatron: its form
    in these formats; None: it has none, and an export is refused.

    A module with parameters of its own or buffers has `initial_values()`: a rule for each, by name. Buffers are FP32,
    the same on all ranks, and saved with the weights. A forward pass does not change them, because it may run twice.
    """

    name: ClassVar[str]
    fused: ClassVar[tuple[FusedKernel, ...]] = ()
    hugging_face: ClassVar[HuggingFaceBlock | None] = None
    megatron: ClassVar[MegatronBlock | None] = None

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__()
        self.execution = execution

    @abstractmethod
    def forward(
        self, x_td: Tensor, sequence_length: int, documents: Documents | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[tokens, hidden] -> [tokens, hidden]; each sequence has `sequence_length` tokens.

        With an auxiliary loss: (the same, the loss of each sequence, FP32 1-dim, or one, 0-dim). Its mean, weighted
        by the sequences' targets, is minimized together with the mean loss of these, and is not part of the loss that a
        run prints.
        documents: no token sees another document than its own; None: a sequence is one document.
        """

    def new_cache(self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype) -> Any:
        """What `decode` keeps of earlier tokens, for `batch` empty texts; None if nothing.

        max_length: limit of tokens per text. dtype: the compute dtype.
        """
        return None

    def decode(self, x_td: Tensor, cache: Any, new: NewTokens) -> Tensor:
        """`forward` of tokens that continue the texts in `cache`; adds them to the cache. No gradients.

        [tokens, hidden] -> [tokens, hidden], tokens = batch * new.length. The functions between the linears are those
        in plain PyTorch on any device, because shapes change from call to call. By default no token depends on another.
        """
        mixed = self(x_td, new.length)
        return mixed if isinstance(mixed, Tensor) else mixed[0]

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raise ConfigError for sizes that do not fit together."""

    @classmethod
    def shared_by_tensor_ranks(cls, config: ModelConfig) -> dict[str, tuple[int, int]]:
        """Key of the configuration -> (number that the tensor-parallel size must divide, the key's value)."""
        return {}

    @classmethod
    def shared_by_expert_ranks(cls, config: ModelConfig) -> dict[str, tuple[int, int]]:
        """The same for the expert-parallel size."""
        return {}

    @classmethod
    @abstractmethod
    def linears(cls, config: ModelConfig) -> Sequence[LinearShape]:
        """Its linears in order of execution; `name` is that of the mixer's attribute."""

    @classmethod
    def flops_per_token(cls, config: ModelConfig, sequence_length: int) -> int:
        """Model FLOPs per token of the forward pass, without the linears."""
        return 0

    @classmethod
    def other_parameters(cls, config: ModelConfig) -> int:
        """Number of parameters, without the linears."""
        return 0

    @classmethod
    def describe_kernels(cls, execution: Execution, masked: bool) -> list[str]:
        """Which kernel computes which part, for the log. masked: whether documents are masked."""
        return [f"{k.title}: {k.package if k.part in execution.kernels else 'torch'}" for k in cls.fused]

    def fp32_units(self) -> list[nn.Module]:
        """Modules whose parameters must stay FP32 in the forward pass."""
        return []

    def routers(self) -> list[nn.Module]:
        """Modules that choose experts and have a bias to balance them (training/callbacks/experts.py)."""
        return []

    @property
    def autotuned(self) -> bool:
        """Whether it has autotuned kernels: their first call measures which configuration is fastest."""
        return False

    def rehearse(
        self, batch: int, sequence_length: int, compute_dtype: torch.dtype, device: torch.device, masked: bool = False
    ) -> None:
        """Run the autotuned kernels forward and backward on constants, in the shapes and dtypes of the run.

        masked: whether the run masks documents. Reads no parameters, changes no state, draws no random numbers.
        """


def check_multiple(config: ModelConfig, name: str, of: str) -> None:
    """Raise ConfigError unless `model.<name>` is a multiple of `model.<of>`."""
    size, divisor = getattr(config, name), getattr(config, of)
    if size % divisor:
        divisors = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
        raise ConfigError(f"model.{name}={size} is not a multiple of model.{of}={divisor}; use one of {divisors}")


def input_projection(
    name: str, config: ModelConfig, out_features: int | Mapping[str, int], groups: int = 1
) -> LinearShape:
    """A mixer's first linear, which reads the hidden state; its outputs are sharded over tensor-parallel ranks.

    out_features: of a packed projection, those of each section (`PackedLinear`). groups: number of equal groups of
    outputs that are never split; each has its share of every section.
    """
    sections = () if isinstance(out_features, int) else tuple((s, n // groups) for s, n in out_features.items())
    outputs = out_features if isinstance(out_features, int) else sum(out_features.values())
    title, key = "the projections into every block", "model.hidden_dim"
    return LinearShape(
        name, 0, config.hidden_dim, outputs, input_key=key, title=title, groups=groups, sections=sections
    )


def output_projection(name: str, config: ModelConfig, in_features: int, input_key: str, title: str) -> LinearShape:
    """A mixer's last linear, which writes to the hidden state; its inputs are sharded over tensor-parallel ranks."""
    hidden = config.hidden_dim
    return LinearShape(name, 0, in_features, hidden, input_key=input_key, input_sharded=True, title=title)
