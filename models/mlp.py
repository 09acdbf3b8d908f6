"""The FFN blocks, without biases.

MLP        down(relu(up(x))^2)             squared ReLU, arXiv:2109.08668
GatedMLP   down(silu(gate(x)) * up(x))     SwiGLU, arXiv:2002.05202, as in Llama
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from megatron_fp4.config.schema import ConfigError, ModelConfig
from megatron_fp4.parallel.layers import ColumnParallelLinear, Layout, PackedLinear, RowParallelLinear, sections_of
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.precision.plan import LinearShape
from models.execution import PLAIN, Execution
from models.mixer import Mixer, input_projection, output_projection
from models.positions import Documents
from models.published import HuggingFaceBlock, MegatronBlock, Section, Sections, group_major_order, split_rows

# Blocks of quantization and of the Hadamard transform are at least this wide, and ranks must not share one.
_TILE = 16
_WIDE_TILE = 128  # the widest block of a format


def check_tiles(config: ModelConfig, key: str) -> None:
    """Raise ConfigError unless the size `model.key` is in complete tiles."""
    if extra := (size := getattr(config, key)) % _TILE:
        raise ConfigError(f"model.{key}={size} is not a multiple of {_TILE}; use {size - extra + _TILE}")


def tiles_of(config: ModelConfig, key: str) -> dict[str, tuple[int, int]]:
    """As `Mixer.shared_by_tensor_ranks`: the tiles of `model.<key>`."""
    size = getattr(config, key)
    return {f"the {size // _TILE} tiles of {_TILE} in model.{key}": (size // _TILE, size)}


def _named(up: str, down: str, config: ModelConfig) -> Sections:
    return {
        "up_proj.weight": [Section(f"{up}.weight", (config.ffn_dim, config.hidden_dim))],
        "down_proj.weight": [Section(f"{down}.weight", (config.hidden_dim, config.ffn_dim))],
    }


def activation(execution: Execution, rows_vary: bool = False) -> Callable[[Tensor], Tensor]:
    """The squared ReLU of an execution. rows_vary: as in `Execution.pure`."""
    # Compiled, the composition of relu and square is one kernel each way; eager, the autograd function is faster.
    function = execution.pure(_squared_relu, rows_vary) if execution.compiled else squared_relu
    return execution.recomputed(function)


class MLP(Mixer):
    """Up projection, squared ReLU, down projection."""

    name = "FFN"
    hugging_face = HuggingFaceBlock(
        types=("mlp",),
        sections=partial(_named, "up_proj", "down_proj"),
        settings={"ffn_dim": ("intermediate_size", 21504)},
        fixed={"mlp_hidden_act": "relu2", "mlp_bias": False},
    )
    megatron = MegatronBlock(
        module="mlp",
        linears=("linear_fc1", "linear_fc2"),
        sections=partial(_named, "linear_fc1", "linear_fc2"),
        sizes=lambda shape, known: {"ffn_dim": shape("linear_fc2.weight")[1]},
        gated=lambda config: False,
    )

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__(config, mesh, execution)
        self.activation = activation(execution)
        up, down = self.linears(config)
        self.up_proj = ColumnParallelLinear(up.in_features, up.out_features, mesh)
        self.down_proj = RowParallelLinear(down.in_features, down.out_features, mesh)

    def inner(self, x_td: Tensor) -> Tensor:
        """What the down projection gets."""
        return self.activation(self.up_proj(x_td))

    def forward(self, x_td: Tensor, sequence_length: int, documents: Documents | None = None) -> Tensor:
        return self.down_proj(self.inner(x_td))

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        check_tiles(config, "ffn_dim")

    @classmethod
    def shared_by_tensor_ranks(cls, config: ModelConfig) -> dict[str, tuple[int, int]]:
        return tiles_of(config, "ffn_dim")

    @classmethod
    def linears(cls, config: ModelConfig) -> Sequence[LinearShape]:
        return (
            input_projection("up_proj", config, config.ffn_dim),
            output_projection("down_proj", config, config.ffn_dim, "model.ffn_dim", "the FFN's down projection"),
        )


def _gate_up_rows(config: ModelConfig) -> dict[str, int]:
    return {"gate": config.ffn_dim, "up": config.ffn_dim}


def _gate_up_groups(config: ModelConfig) -> int:
    """Equal groups of gate_up_proj's rows, each first of gate, then of up: as wide as the largest block of a format, if
    the width allows it, so that no block has rows of both and ranks can share the groups."""
    return config.ffn_dim // (_WIDE_TILE if config.ffn_dim % _WIDE_TILE == 0 else _TILE)


def gate_up_order(config: ModelConfig) -> Tensor:
    """`group_major_order` of gate_up_proj: published checkpoints have `[gate | up]`."""
    return group_major_order([*_gate_up_rows(config).values()], _gate_up_groups(config))


def _gated_named(gate_up: Sequence[str], down: str, config: ModelConfig) -> Sections:
    """gate_up: the tensors that together have the rows `[gate | up]`."""
    sizes = [sum(_gate_up_rows(config).values()) // len(gate_up)] * len(gate_up)
    names = [f"{name}.weight" for name in gate_up]
    return {
        "gate_up_proj.weight": split_rows(names, sizes, gate_up_order(config), config.hidden_dim),
        "down_proj.weight": [Section(f"{down}.weight", (config.hidden_dim, config.ffn_dim))],
    }


class GatedMLP(MLP):
    """Gate and up projections in one linear, SwiGLU, down projection."""

    name = "gated FFN"
    hugging_face = HuggingFaceBlock(
        types=(), sections=partial(_gated_named, ["gate_proj", "up_proj"], "down_proj"), settings={}
    )
    megatron = replace(
        MLP.megatron, sections=partial(_gated_named, ["linear_fc1"], "linear_fc2"), gated=lambda config: True
    )

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        Mixer.__init__(self, config, mesh, execution)
        self.num_local_groups = _gate_up_groups(config) // mesh.tensor.size
        self._swiglu = execution.recomputed(execution.pure(swiglu))
        gate_up, down = self.linears(config)
        self.gate_up_proj = PackedLinear(gate_up.in_features, gate_up.sections, mesh, gate_up.groups)
        self.down_proj = RowParallelLinear(down.in_features, down.out_features, mesh)

    def inner(self, x_td: Tensor) -> Tensor:
        return self._swiglu(self.gate_up_proj.layout, self.num_local_groups, *self.gate_up_proj(x_td))

    @classmethod
    def shared_by_tensor_ranks(cls, config: ModelConfig) -> dict[str, tuple[int, int]]:
        groups = _gate_up_groups(config)
        return {f"the {groups} tiles of {config.ffn_dim // groups} in model.ffn_dim": (groups, config.ffn_dim)}

    @classmethod
    def linears(cls, config: ModelConfig) -> Sequence[LinearShape]:
        return (
            input_projection("gate_up_proj", config, _gate_up_rows(config), _gate_up_groups(config)),
            output_projection("down_proj", config, config.ffn_dim, "model.ffn_dim", "the FFN's down projection"),
        )


def swiglu(layout: Layout, groups: int, *parts_td: Tensor) -> Tensor:
    """silu(gate) * up [tokens, ffn] of the result of `gate_up_proj`."""
    gate, up = sections_of(parts_td, layout, groups, "gate", "up")
    return (F.silu(gate) * up).flatten(-2)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, elementwise. Saves relu(x) for the backward pass, dx = 2 relu(x) dy."""
    return _SquaredReLU.apply(x)  # type: ignore[return-value]


def _squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


class _SquaredReLU(Function):
    # Autograd's composition reads the tensor three more times, which on a CPU costs as much as a GEMM.
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rectified = x.relu()
        ctx.save_for_backward(rectified)
        return rectified * rectified

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (rectified,) = ctx.saved_tensors
        return (grad_outputs[0] * rectified).mul_(2)
