"""What training asks of the model and of the data: `pretrain.py` hands over one module of each.

`models/provider.py` and `data/provider.py` are those of this project. Another model or another loader needs the same
names; nothing under megatron_fp4 imports either.
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
    """A module with these functions. An execution is which kernels compute the model; nothing here looks into it."""

    def check(self, config: Config) -> None:
        """Raise ConfigError for a model that cannot be."""

    def check_exceptions(self, exceptions: Any, key: str) -> None:
        """Raise ConfigError for precision exceptions that name no linear of any model. key: whose they are."""

    def shared_by_tensor_ranks(self, config: ModelConfig) -> Mapping[str, tuple[int, int]]:
        """What tensor-parallel ranks divide among them, by its key, with the value of that key."""

    def linear_shapes(self, config: ModelConfig) -> list[LinearShape]:
        """The linears that a precision plan decides about, in order of execution."""

    def parameter_count(self, config: ModelConfig) -> Any:
        """`total` and parts."""

    def forward_flops_per_token(self, config: ModelConfig, sequence_length: int) -> int:
        """Model FLOPs of forward."""

    def training_flops_per_token(self, config: ModelConfig, sequence_length: int) -> int:
        """Model FLOPs of forward and backward."""

    def choose_execution(self, config: Config, device_type: str) -> Any:
        """The execution on such a device. Raises ConfigError where it cannot be."""

    def agreed_execution(self, execution: Any) -> Any:
        """The same, if all ranks chose alike; a collective. Raises ConfigError if not."""

    def planned_execution(self, config: Config) -> Any:
        """An execution that allocates as a GPU's kernels do, for runs on fake tensors."""

    def describe_execution(self, execution: Any, config: Config) -> str:
        """One line."""

    def build_model(self, config: ModelConfig, mesh: ParallelMesh, compute_dtype: torch.dtype, execution: Any) -> Any:
        """A model with uninitialized parameters, on the default device.

        model(tokens, targets, ...) returns the micro-batch's mean loss over the targets that count, FP32 0-dim. It has
        `blocks`, `embedding` and `head` (the units of FSDP), `linears()` (name and module of every linear of
        `linear_shapes`; the plan is written into `module.context`), `fp32_units()` (modules whose parameters stay FP32
        in the forward pass) and `autotuned_mixers()` (one of each kind of module whose kernels are to be tuned; each
        has `rehearse`).
        """

    def initialize(self, model: Any, config: ModelConfig, seed: int) -> None:
        """Give the parameters their initial values, the same on any mesh."""

    def parts(self, model: Any, config: Config) -> list[tuple[str, int, int]]:
        """Name, number and parameters of what the model consists of."""

    def kernel_facts(self, model: Any, config: Config, device_type: str) -> dict[str, str | None]:
        """What computes the model, for people."""


@dataclass(frozen=True)
class MicroBatch:
    """What a step needs of a micro-batch; the data's own class has the same fields.

    index: within the global batch, the same whichever rank computes it. tokens, targets: int64 [micro_batch_size,
    sequence_length]. documents: int32, the same shape: numbers of documents, if they are masked. num_documents: of all
    rows together, if they are masked. num_targets: how many targets count, where negative ones do not; None: all do.
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
        """Raise ConfigError for settings that do nothing with `data.kind`."""

    def phases(self, config: Config) -> Any:
        """The phases before any data is opened: `spans`, each with `name`, `first_step`, `end_step`, `batch_size` and
        `sequence_length` (None: the run's). Raises ValueError for phases that cannot be."""

    def open_data(self, config: Config, mesh: ParallelMesh, is_refusal: Callable[[Exception], bool]) -> Any:
        """The run's data, agreed on by all ranks; a collective. Raises ValueError on all ranks.

        loader: `steps(first, last)` yields this rank's micro-batches (`MicroBatch`) of each step; `consumed_samples`,
        `data_wait` and `changes` (lines: what is other data than the checkpoint's); it has the state of the data.
        phases: as above, with `samples_before(step)`, `span(step)` and `source_ranges(first, last)`.
        validation: held-out sets, each with `name` and `batches(size, dp_rank, dp_size)`. bundle: with the `tokenizer`.
        And what `data/provider.py`'s RunData computes of these.
        """

    def open_alone(self, config: Config) -> Any:
        """As one process sees it that does not train."""
