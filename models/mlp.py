"""The FFN block: down(relu(up(x))^2) (squared ReLU, arXiv:2109.08668).

Shapes: t tokens, d hidden, f FFN features of this rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from megatron_fp4.config.schema import ModelConfig
from megatron_fp4.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_fp4.parallel.mesh import ParallelMesh
from models.execution import PLAIN, Execution
from models.recompute import Recompute


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, elementwise. Keeps relu(x) for the backward pass, which is 2 relu(x) dy."""
    return _SquaredReLU.apply(x)  # type: ignore[return-value]


class MLP(nn.Module):
    """Up projection, squared ReLU, down projection; no gate and no biases."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__()
        self.recompute = Recompute(execution.recompute == "selective")
        # Compiled, autograd's composition is one pass each way; eager, it takes the function written by hand.
        self._activation = execution.pure(_squared_relu) if execution.compiled else squared_relu
        self.up_proj = ColumnParallelLinear(config.hidden_dim, config.ffn_dim, mesh)
        self.down_proj = RowParallelLinear(config.ffn_dim, config.hidden_dim, mesh)

    def forward(self, x_td: Tensor, sequence_length: int) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; tokens do not see each other."""
        up = self.recompute.expensive(self.up_proj, x_td)
        return self.recompute.expensive(self.down_proj, self.recompute.cheap(self._activation, up))


def _squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


class _SquaredReLU(Function):
    # Autograd's own composition walks over the tensor three times more, which on a CPU costs as much as a GEMM.
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rectified = x.relu()
        ctx.save_for_backward(rectified)
        return rectified * rectified

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (rectified,) = ctx.saved_tensors
        return (grad_outputs[0] * rectified).mul_(2)
