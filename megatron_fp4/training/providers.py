"""The interfaces that training needs of the model and of the data. `pretrain.py` passes in one module for each.

This project's modules are `models/provider.py` and `data/provider.py`. Another model or loader needs functions of the
same names; nothing under megatron_fp4 imports either module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_fp4.config.schema import Config, ModelConfig
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.plan import LinearShape


class ModelProvider(Protocol):
    """A module with these functions. An `execution` says which kernels compute the model; the provider reads it."""

    def check(self, config: Config) -> None:
        """Raise ConfigError for a model that is not possible."""

    def check_exceptions(self, exceptions: Any, key: str) -> None:
        """Raise ConfigError for precision exceptions that match no linear of any model. key: of their precision."""

    def divided_counts(self, config: ModelConfig) -> Mapping[str, Mapping[str, tuple[int, int]]]:
        """What the ranks of each mesh axis that the model knows divide among them: key of the axis's size in
        ParallelConfig -> key of the configuration -> (count, value of the key)."""

    def linear_shapes(self, config: ModelConfig) -> list[LinearShape]:
        """The linears that a precision plan decides about, in order of execution."""

    def parameter_count(self, config: ModelConfig) -> Any:
        """The number of parameters: `total`, `head` and other parts."""

    def active_parameters(self, config: ModelConfig) -> int:
        """The number of parameters that a token uses."""

    def forward_flops_per_token(self, config: ModelConfig, sequence_length: int) -> int:
        """Model FLOPs of a token, forward."""

    def training_flops_per_token(self, config: ModelConfig, sequence_length: int) -> int:
        """Model FLOPs of a token, forward and backward."""

    def choose_execution(self, config: Config, device_type: str) -> Any:
        """The execution on a device of this type. Raises ConfigError if it is not possible."""

    def agreed_execution(self, execution: Any) -> Any:
        """`execution`, if all ranks chose the same. A collective. Raises ConfigError if not."""

    def planned_execution(self, config: Config) -> Any:
        """An execution that only allocates what a GPU's kernels do, for runs on fake tensors."""

    def describe_execution(self, execution: Any, config: Config) -> str:
        """One line about it."""

    def build_model(self, config: ModelConfig, mesh: ParallelMesh, compute_dtype: torch.dtype, execution: Any) -> Any:
        """A model with uninitialized parameters, on the default device.

        model(tokens, targets, ...) returns the micro-batch's mean loss over the targets that count, FP32 0-dim. Its
        attributes and methods: `blocks`, `mtp` (the parts of multi-token prediction), `embedding` and `head`, FSDP2's
        units; `linears()`, name and module of
        every linear of `linear_shapes`, with the precision plan in `module.context`; `fp32_units()`, modules whose
        parameters stay FP32 in the forward pass; `routers()`, the modules that balance experts, by name of their
        block; `autotuned_mixers()`, one module of each kind that has autotuned
        kernels, with a method `rehearse`.
        """

    def initialize(self, model: Any, config: ModelConfig, seed: int) -> None:
        """Give the parameters their initial values, the same on any mesh."""

    def parts(self, model: Any, config: Config) -> list[tuple[str, int, int]]:
        """Name, number and parameters of each kind of part of the model."""

    def kernel_facts(self, model: Any, config: Config, device_type: str) -> dict[str, str | None]:
        """Which kernels compute the model, as text for the banner."""


@dataclass(frozen=True)
class MicroBatch:
    """The fields of a micro-batch that a step needs; the data's own class has them too.

    index: within the global batch; it does not depend on the rank. tokens, targets: int64 [micro_batch_size,
    sequence_length]. documents: int32, the same shape: each token's document; None: not masked. num_documents: in all
    rows together; None: not masked. num_targets: how many targets count (negative ones do not); None: all.
    """

    index: int
    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None = None
    num_documents: int | None = None
    num_targets: int | None = None


class DataProvider(Protocol):
    """A module with these functions."""

    def check_kind(self, config: Any) -> None:
        """Raise ConfigError for settings that have no effect with this `data.kind`."""

    def phases(self, config: Config) -> Any:
        """The phases, known before any data is opened: `spans`, each with `name`, `first_step`, `end_step`,
        `batch_size` and `sequence_length` (None: the run's). Raises ValueError for phases that are not possible."""

    def open_data(self, config: Config, mesh: ParallelMesh, is_refusal: Callable[[Exception], bool]) -> Any:
        """The run's data, the same on all ranks. A collective. Raises ValueError on all ranks.

        loader: `steps(first, last)` yields this rank's micro-batches (`MicroBatch`) of each step; it also has
        `consumed_samples`, `data_wait`, `changes` (lines about data that differs from the checkpoint's) and the state
        of the data. phases: as above, with `samples_before(step)`, `span(step)` and `source_ranges(first, last)`.
        validation: held-out sets, each with `name` and `batches(size, rank, num_ranks)`. bundle: has the `tokenizer`.
        The other members are those of RunData in `data/provider.py`.
        """

    def open_alone(self, config: Config) -> Any:
        """The run's data for one process that does not train."""
