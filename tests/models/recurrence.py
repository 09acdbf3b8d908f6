"""Mamba-2's recurrence token by token, the reference for chunked scans."""

import torch
from torch import Tensor


def ssd_recurrence(
    x_bshp: Tensor, dt_bsh: Tensor, a_h: Tensor, b_bsgn: Tensor, c_bsgn: Tensor, documents_bs: Tensor | None = None
) -> Tensor:
    """`models.ssd.ssd_scan` by its definition, in any dtype; autograd differentiates it."""
    repeats = x_bshp.shape[2] // b_bsgn.shape[2]
    b_bshn, c_bshn = b_bsgn.repeat_interleave(repeats, 2), c_bsgn.repeat_interleave(repeats, 2)
    state_bhpn = x_bshp.new_zeros(x_bshp.shape[0], *x_bshp.shape[2:], b_bsgn.shape[3])
    outputs = []
    for t in range(x_bshp.shape[1]):
        decay_bh = (dt_bsh[:, t] * a_h).exp()
        if documents_bs is not None and t > 0:
            decay_bh = decay_bh * (documents_bs[:, t] == documents_bs[:, t - 1])[:, None]
        update_bhp = dt_bsh[:, t, :, None] * x_bshp[:, t]
        state_bhpn = decay_bh[..., None, None] * state_bhpn + update_bhp[..., None] * b_bshn[:, t, :, None]
        outputs.append((state_bhpn * c_bshn[:, t, :, None]).sum(-1))
    return torch.stack(outputs, 1)
