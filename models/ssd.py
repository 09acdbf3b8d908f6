"""Mamba-2's scan: step sizes, the state-space recurrence and the skip connection D x.

    dt = softplus(dt + dt_bias)         not clamped, as in mamba-ssm by default
    y  = ssd(x, dt, A, B, C) + D x

`fused_scan` uses mamba-ssm's kernels. `plain_scan` is plain PyTorch, in the state-space dual (SSD) form of the
recurrence (arXiv:2405.21060, section 6).

The recurrence, for one head, with state S [p, n]:

    S_t = exp(dt_t a) S_{t-1} + dt_t x_t B_t^T        y_t = S_t C_t

Unrolled, y_t = sum_{m <= t} (C_t . B_m) exp(w_{m+1} + ... + w_t) dt_m x_m with w = dt a: attention with a decay
instead of a softmax. Sequences are cut into chunks of l tokens. With cum the running sum of w in a chunk and u = dt x:

    its own token     y  = (C . B) u
    inside a chunk    y += (C B^T * exp(cum_t - cum_m) [m < t]) u                matrices [l, l]
    a chunk's state   N  = B^T (exp(cum_last - cum) u)                           [n, p]
    between chunks    S_k = sum_{j < k} exp(w of the chunks between j and k) N_j  the state that chunk k begins with
    from the past     y += exp(cum) (C S)

The work is linear in the sequence length, and nearly all of it is matrix products. Every decay is the exponential of a
number that is at most zero, so nothing overflows. On CUDA the products must be true FP32, so
`torch.backends.cuda.matmul.allow_tf32` must stay off, which is its default.

The backward pass is an autograd function. It saves the inputs, the output without each token's own part, and the states
(which are small), and recomputes the [l, l] matrices, so these exist for one layer at a time. The gradient of the
decays needs no products of [l, l] matrices: d/dcum_t is dy_t . y_t - u_t . du_t, plus what flows through the states.
The own parts of y_t and du_t do not depend on a decay, so they cancel in this difference. With fast decays they are
nearly all of both terms, and the difference would be their rounding error. So they are left out of both terms.

Documents (models/positions.py) end the recurrence: S is zero before the first token of each. So the running sum cum
restarts with every document (the triangle of ones that computes it has zeros between documents). Inside a chunk a token
sees only its own document. It sees the state from the past if its document began in an earlier chunk. A chunk's state
is that of the document with which it ends. A chunk passes the earlier state on if all its tokens continue one document
from the chunk before. mamba-ssm's kernels make the same comparisons of document numbers.

Everything is computed in the dtype of `x`: FP32 in training, FP64 in tests.

Shapes: b batch, s sequence, h heads, p head dimension, g state groups, n state dimension, r heads per group,
k chunks (j: another one), l position in a chunk (m: another one). Head i belongs to group i // r.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


class ScanInputs(NamedTuple):
    """dt is before bias and softplus; A is negative."""

    x_bshp: Tensor
    dt_bsh: Tensor
    a_h: Tensor
    b_bsgn: Tensor
    c_bsgn: Tensor
    d_h: Tensor
    dt_bias_h: Tensor


def plain_scan(inputs: ScanInputs, chunk_size: int, documents_bs: Tensor | None = None) -> Tensor:
    """y [b, s, h, p] of the formulas above in plain PyTorch. All tensors are FP32; `dt_bsh` may also be BF16.

    documents_bs: int32, the number of each token's document, ascending in a row; None: a row is one document.
    """
    x, dt, a, b, c, d, dt_bias = inputs
    dt = F.softplus(dt.to(torch.float32) + dt_bias)
    return torch.addcmul(ssd_scan(x, dt, a, b, c, chunk_size, documents_bs), x, d[:, None])


def continued_scan(inputs: ScanInputs, chunk_size: int, state_bgnrp: Tensor, valid_bs: Tensor) -> tuple[Tensor, Tensor]:
    """`plain_scan` of rows that continue from a state S, and the state after their last token. No gradients.

    state_bgnrp: S^T of the r heads of each group; zeros at a text's beginning. valid_bs: bool, false for padding, which
    is a step of size zero and does not change the state.
    """
    x, dt, a, b, c, d, dt_bias = inputs
    dt = F.softplus(dt.to(torch.float32) + dt_bias).masked_fill(~valid_bs[..., None], 0)
    length, padded = x.shape[1], x
    chunk_size = min(chunk_size, length)
    if extra := -length % chunk_size:
        padded, dt, b, c = _with_empty_steps(extra, x, dt, b, c)
    chunks = _Chunks(padded, dt, a, b, c, chunk_size, None)
    y, _, states, added = _outputs(chunks, state_bgnrp)
    last_state = states.unflatten(-1, chunks.r_p)[:, -1]  # at the beginning of the last chunk
    state_after = torch.addcmul(added, last_state, chunks.chunk_decay[:, -1, :, None, :, None])
    return torch.addcmul(y[:, :length], x, d[:, None]), state_after


def fused_scan(inputs: ScanInputs, chunk_size: int, documents_bs: Tensor | None = None) -> Tensor:
    """`plain_scan` by mamba-ssm's Triton kernels: x, dt, B, C and y in BF16, the rest in FP32."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, dt, a, b, c, d, dt_bias = inputs
    return mamba_chunk_scan_combined(
        x, dt, a, b, c, chunk_size, D=d, dt_bias=dt_bias, seq_idx=documents_bs, dt_softplus=True
    )


def ssd_scan(
    x_bshp: Tensor,
    dt_bsh: Tensor,
    a_h: Tensor,
    b_bsgn: Tensor,
    c_bsgn: Tensor,
    chunk_size: int,
    documents_bs: Tensor | None = None,
) -> Tensor:
    """y [b, s, h, p] of the recurrence above, in chunks of `chunk_size` tokens. The sequence may have any length, and
    all tensors have one dtype. dt_bsh: positive step sizes. documents_bs: see `plain_scan`."""
    length = x_bshp.shape[1]
    chunk_size = min(chunk_size, length)
    extra = -length % chunk_size
    if extra:
        x_bshp, dt_bsh, b_bsgn, c_bsgn = _with_empty_steps(extra, x_bshp, dt_bsh, b_bsgn, c_bsgn)
        documents_bs = None if documents_bs is None else F.pad(documents_bs, (0, extra), value=-1)
    y: Tensor = _SsdScan.apply(x_bshp, dt_bsh, a_h, b_bsgn, c_bsgn, chunk_size, documents_bs)  # type: ignore[assignment]
    return y[:, :length] if extra else y


def _with_empty_steps(
    extra: int, x_bshp: Tensor, dt_bsh: Tensor, b_bsgn: Tensor, c_bsgn: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows with `extra` more steps of size zero, which neither decay the state nor add to it."""
    x, b, c = (F.pad(t, (0, 0, 0, 0, 0, extra)) for t in (x_bshp, b_bsgn, c_bsgn))
    return x, F.pad(dt_bsh, (0, 0, 0, extra)), b, c


class _SsdScan(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, documents: Tensor | None
    ) -> Tensor:
        y, y_before, states, _ = _outputs(_Chunks(x, dt, a, b, c, chunk_size, documents))
        ctx.save_for_backward(x, dt, a, b, c, documents, y_before, states)
        ctx.chunk_size = chunk_size
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, documents, y_before, states = ctx.saved_tensors
        chunks = _Chunks(x, dt, a, b, c, ctx.chunk_size, documents)
        dy_by_head, x_by_head = chunks.by_head(grad_outputs[0]), chunks.by_head(x)
        dy = dy_by_head.contiguous()

        # Own token and inside a chunk: y = (C . B) u + (scores * decays) u.
        decays, own_scores = chunks.decays(), chunks.own_scores()
        dscores = chunks.same_document_((dy @ chunks.u_by_head().mT).mul_(decays).sum(3).tril_())
        du = decays.mul_(chunks.scores_before()).mT @ dy
        dc, db = dscores @ chunks.b, dscores.mT @ chunks.c
        x_du_inside = (du * x_by_head).sum(-1)
        x_du_own = (dy * x_by_head).sum(-1).mul_(own_scores)
        du.addcmul_(dy, own_scores[..., None])

        # From the past: y += exp(cum) (C S).
        dy_decayed = _product(chunks.by_group(grad_outputs[0]), chunks.past_decay().mT[..., None]).flatten(-2)
        dc += dy_decayed @ states.mT
        dstates = chunks.c.mT @ dy_decayed

        # Between chunks: S_{k+1} = exp(cum_last) S_k + N_k. From here on `dstates` holds the gradient of N.
        _accumulate_states_backward(dstates.unflatten(-1, chunks.r_p), chunks.chunk_decay)
        dchunk_decay = (dstates * states).unflatten(-1, chunks.r_p).sum((3, 5))

        # A chunk's state: N = B^T v with v = exp(cum_last - cum) u.
        dv = chunks.b @ dstates
        db += chunks.weighted_u_by_group() @ dstates.mT
        dv_by_head, decay_to_end = dv.unflatten(-1, chunks.r_p).transpose(3, 4), chunks.decay_to_end()
        x_du_states = (dv_by_head * x_by_head).sum(-1).mul_(decay_to_end)
        du.addcmul_(dv_by_head, decay_to_end[..., None])

        # u = dt x and cum = running sum of w = dt a. Only later tokens' decays act on what a token adds to the state.
        dcum = (dy_by_head * chunks.by_head(y_before)).sum(-1).addcmul_(chunks.dt, x_du_inside, value=-1)
        dcum[..., -1] += dchunk_decay * chunks.chunk_decay
        dw = dcum @ chunks.ones_lm + (chunks.dt * x_du_states) @ chunks.ones_lm.mT.triu(1)
        da = (dw * chunks.dt).sum((0, 1, 4)).flatten()
        dx, ddt = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt))
        torch.mul(du, chunks.dt[..., None], out=chunks.by_head(dx))
        x_du = x_du_inside.add_(x_du_own).add_(x_du_states)
        torch.addcmul(x_du, dw, chunks.a, out=chunks.by_head(ddt))
        return dx, ddt, da, chunks.ungroup(db), chunks.ungroup(dc), None, None


def _outputs(chunks: _Chunks, initial: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y; y without each token's own part; the state at the beginning of each chunk; what the last adds.

    initial: the state at the beginning of the first chunk, [b, g, n, r, p]; None: zero.
    """
    x = chunks.x
    y_inside = chunks.decays().mul_(chunks.scores_before()) @ chunks.u_by_head()
    states = chunks.b.mT @ chunks.weighted_u_by_group()
    added = _accumulate_states(states.unflatten(-1, chunks.r_p), chunks.chunk_decay, initial)
    y_past = (chunks.c @ states).unflatten(-1, chunks.r_p).transpose(3, 4)
    y_before, y = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    torch.addcmul(y_inside, y_past, chunks.past_decay()[..., None], out=chunks.by_head(y_before))
    own_scale = chunks.own_scores() * chunks.dt
    torch.addcmul(chunks.by_head(y_before), chunks.by_head(x), own_scale[..., None], out=chunks.by_head(y))
    return y, y_before, states, added


class _Chunks:
    """The inputs cut into chunks, and what both passes compute from them.

    All tensors begin with [b, k, g]. Then follow [r, l, p] in the layout "by head" (a matrix per head), or [l, r, p] in
    the layout "by group" (one wide matrix for all heads that share B and C).
    """

    def __init__(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, documents_bs: Tensor | None
    ) -> None:
        self.chunk_size, self.num_groups = chunk_size, b.shape[2]
        self.r_p = (x.shape[2] // self.num_groups, x.shape[3])
        self.x = x
        self.a = a.view(self.num_groups, -1, 1)
        self.dt = self.by_head(dt).contiguous()
        self.b, self.c = (t.unflatten(1, (-1, chunk_size)).transpose(2, 3).contiguous() for t in (b, c))
        # Running sums as products with a triangle of ones: `cumsum` has no deterministic kernel on CUDA.
        self.ones_lm = x.new_ones(chunk_size, chunk_size).tril()
        self.masked = documents_bs is not None
        if documents_bs is not None:
            documents_bkl = documents_bs.unflatten(1, (-1, chunk_size))
            same = documents_bkl[..., :, None] == documents_bkl[..., None, :]
            self.ones_lm = (self.ones_lm * same)[:, :, None]  # [b, k, 1, l, m]
            last_bk = documents_bkl[..., -1]
            previous_bk = F.pad(last_bk[:, :-1], (1, 0), value=-1)  # no document continues into the first chunk
            # Whether a token is in the last document of the previous chunk, or of its own: [b, k, 1, 1, l].
            self.from_past = (documents_bkl == previous_bk[..., None])[:, :, None, None]
            self.to_end = (documents_bkl == last_bk[..., None])[:, :, None, None]
        self.cum = (self.dt * self.a) @ self.ones_lm.mT
        self.chunk_decay = self.cum[..., -1].exp()
        if self.masked:
            self.chunk_decay *= self.from_past[..., -1]

    def by_head(self, t_bsh: Tensor) -> Tensor:
        """[b, s, h, ...] -> [b, k, g, r, l, ...], a view."""
        return t_bsh.unflatten(1, (-1, self.chunk_size)).unflatten(3, (self.num_groups, -1)).movedim(2, 4)

    def by_group(self, t_bsh: Tensor) -> Tensor:
        """[b, s, h, ...] -> [b, k, g, l, r, ...], a view."""
        return t_bsh.unflatten(1, (-1, self.chunk_size)).unflatten(3, (self.num_groups, -1)).movedim(2, 3)

    def ungroup(self, t_bkgln: Tensor) -> Tensor:
        """[b, k, g, l, n] -> [b, s, g, n]."""
        return t_bkgln.transpose(2, 3).flatten(1, 2)

    def decays(self) -> Tensor:
        """exp(cum_l - cum_m), [b, k, g, r, l, m]; 1 where m > l, which callers mask out."""
        return (self.cum[..., :, None] - self.cum[..., None, :]).clamp_(max=0).exp_()

    def scores_before(self) -> Tensor:
        """C B^T where m < l, else 0: [b, k, g, 1, l, m]."""
        # Masked here, once for all heads of a group, instead of in the decays of every head.
        return self.same_document_((self.c @ self.b.mT).tril_(-1))[:, :, :, None]

    def same_document_(self, t_bkglm: Tensor) -> Tensor:
        """Set to zero, in place, where l and m are in different documents."""
        return t_bkglm.mul_(self.ones_lm) if self.masked else t_bkglm

    def own_scores(self) -> Tensor:
        """C . B of each token, [b, k, g, 1, l]."""
        return (self.c * self.b).sum(-1)[:, :, :, None]

    def decay_to_end(self) -> Tensor:
        """exp(cum_last - cum), [b, k, g, r, l]; zero for tokens before the chunk's last document."""
        to_end = self.cum[..., -1:] - self.cum
        if self.masked:  # before the exponential, because between documents the difference may be large
            to_end.masked_fill_(~self.to_end, -torch.inf)
        return to_end.exp_()

    def past_decay(self) -> Tensor:
        """exp(cum), [b, k, g, r, l]; zero for tokens after the last document of the previous chunk."""
        decay = self.cum.exp()
        return decay.mul_(self.from_past) if self.masked else decay

    def u_by_head(self) -> Tensor:
        """dt x, [b, k, g, r, l, p]."""
        return _product(self.by_head(self.x), self.dt[..., None])

    def weighted_u_by_group(self) -> Tensor:
        """exp(cum_last - cum) dt x, [b, k, g, l, r p]."""
        return _product(self.by_group(self.x), (self.dt * self.decay_to_end()).mT[..., None]).flatten(-2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a * b, contiguous; plain multiplication would keep the strides of a permuted view."""
    return torch.mul(a, b, out=a.new_empty(a.shape))


def _accumulate_states(states_bkgnrp: Tensor, decay_bkgr: Tensor, initial: Tensor | None = None) -> Tensor:
    """Replace what each chunk adds to the state by the state at its beginning, in place. Returns what the last chunk
    adds. initial: the state at the beginning of the first chunk; None: zero."""
    decay = decay_bkgr[:, :, :, None, :, None]
    added = states_bkgnrp[:, 0].clone()
    states_bkgnrp[:, 0] = 0 if initial is None else initial
    for k in range(1, states_bkgnrp.shape[1]):
        state = torch.addcmul(added, states_bkgnrp[:, k - 1], decay[:, k - 1])
        added = states_bkgnrp[:, k].clone()
        states_bkgnrp[:, k] = state
    return added


def _accumulate_states_backward(grads_bkgnrp: Tensor, decay_bkgr: Tensor) -> None:
    """Replace the gradients of the states at the beginning of chunks by those of what each chunk adds, in place."""
    decay = decay_bkgr[:, :, :, None, :, None]
    later = torch.zeros_like(grads_bkgnrp[:, 0])
    for k in reversed(range(grads_bkgnrp.shape[1])):
        state_gradient = torch.addcmul(grads_bkgnrp[:, k], later, decay[:, k])
        grads_bkgnrp[:, k] = later
        later = state_gradient
