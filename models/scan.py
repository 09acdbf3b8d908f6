"""What Mamba-2 calls its scan: step sizes, the state-space recurrence and the skip connection D x.

    dt = softplus(dt + dt_bias)         not clamped, as mamba-ssm's default
    y  = ssd(x, dt, A, B, C) + D x

In plain PyTorch (models/ssd.py) and by mamba-ssm's kernels.

Shapes: b batch, s sequence, h heads of this rank, p head dimension, g state groups of this rank, n state dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.ssd import ssd_scan, ssd_scan_from


class ScanInputs(NamedTuple):
    """x [b, s, h, p]; dt [b, s, h] before its bias and softplus; A [h], negative; B and C [b, s, g, n]; D and dt_bias
    [h]. Head i belongs to group i // (h / g)."""

    x_bshp: Tensor
    dt_bsh: Tensor
    a_h: Tensor
    b_bsgn: Tensor
    c_bsgn: Tensor
    d_h: Tensor
    dt_bias_h: Tensor


def plain_scan(inputs: ScanInputs, chunk_size: int, documents_bs: Tensor | None = None) -> Tensor:
    """y [b, s, h, p] of the formulas above in plain PyTorch; all FP32 but `dt_bsh`, which may be BF16.

    documents_bs: int32, the number of each token's document, ascending in a row; None: a row is one document.
    """
    x, dt, a, b, c, d, dt_bias = inputs
    dt = F.softplus(dt.to(torch.float32) + dt_bias)
    return torch.addcmul(ssd_scan(x, dt, a, b, c, chunk_size, documents_bs), x, d[:, None])


def continued_scan(inputs: ScanInputs, chunk_size: int, state_bgnrp: Tensor, valid_bs: Tensor) -> tuple[Tensor, Tensor]:
    """`plain_scan` of rows that go on from a state (models/ssd.py), and the state behind them. No gradients.

    valid_bs: bool; where it is false, a token is padding, and passes the state on.
    """
    x, dt, a, b, c, d, dt_bias = inputs
    dt = F.softplus(dt.to(torch.float32) + dt_bias).masked_fill(~valid_bs[..., None], 0)
    y, state = ssd_scan_from(x, dt, a, b, c, chunk_size, state_bgnrp)
    return torch.addcmul(y, x, d[:, None]), state


def fused_scan(inputs: ScanInputs, chunk_size: int, documents_bs: Tensor | None = None) -> Tensor:
    """The same by mamba-ssm's Triton kernels: x, dt, B and C in BF16, the rest in FP32; BF16 out.

    They take a state over from the chunk before if its last token and the token in question have the same number, so a
    number must not come back later in a row; a negative one means padding.
    """
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, dt, a, b, c, d, dt_bias = inputs
    return mamba_chunk_scan_combined(
        x, dt, a, b, c, chunk_size, D=d, dt_bias=dt_bias, seq_idx=documents_bs, dt_softplus=True
    )
