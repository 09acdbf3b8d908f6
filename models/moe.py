"""The block of experts (mixture of experts, latent experts): a router chooses k of E FFNs for each token.

    s = sigmoid(W x), or softmax                          scores of the experts, FP32
    K = the k largest of s + bias                         within the best groups of experts, if there are groups
    w = scaling s / (sum of s over K)                     for the experts in K
    y = from_latent(sum_K w down(relu(up(to_latent(x)))^2)) + shared(x)

Without latent experts to_latent and from_latent are left out. The shared expert is an FFN for every token. With
`moe_activation=swiglu` all experts are gated FFNs; their up projection then has gate and up, packed as in GatedMLP.

The router is FP32: weight, bias, products, gradient. Of equal scores the expert with the lowest number is chosen. The
bias has no gradient: after each step it rises for experts with fewer tokens than the mean of the global batch and falls
for the others, by `moe_bias_rate`, and its mean stays 0, which changes no choice (arXiv:2408.15664; DeepSeek-V3,
arXiv:2412.19437, section 2.1.2). Tokens are counted in integers, so the bias is the same on any mesh.

For each sequence of S tokens there are two more losses, as in Megatron (`seq_aux_loss`, `z_loss`):

    moe_aux_loss E / (k S^2) sum_e(n_e sum_t p_te)        p = s / (sum of s); n_e: tokens with e among their k largest s
    moe_z_loss / S sum_t(log sum_e exp(Wx)_te)^2

Tokens are sorted by expert, and by their position within an expert. No token is dropped. With expert parallelism the
rows travel to the ranks that have their experts, and back (parallel/expert_parallel.py). Tensor-parallel ranks divide
the experts too, but all have all tokens: each computes the rows of its own experts, the others' are zeros, and the
ranks' results are summed. So an expert is never cut, and its codes are those of one rank. All choose the same experts;
a rank has the part of the router's gradient that its own experts give.

Shapes: t tokens, e experts, k experts of a token, n = t k rows that experts compute, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron_fp4.config.schema import ConfigError, ModelConfig
from megatron_fp4.parallel.expert_parallel import Exchange, NoExchange
from megatron_fp4.parallel.layers import (
    ColumnParallelLinear,
    GroupedLinear,
    Layout,
    RowParallelLinear,
    enter_tensor_parallel,
    gather_features,
    leave_tensor_parallel,
    scatter_features,
)
from megatron_fp4.parallel.mesh import ParallelMesh
from megatron_fp4.parallel.parameters import local_parameter, new_parameter
from megatron_fp4.precision.plan import LinearShape
from megatron_fp4.quantization.segments import Segments
from models.execution import PLAIN, Execution, decided
from models.initialization import Rule
from models.mixer import Mixer, check_multiple, input_projection, output_projection
from models.mlp import MLP, GatedMLP, activation, check_tiles, gate_up_order, swiglu, tiles_of
from models.positions import Documents
from models.published import HuggingFaceBlock, MegatronBlock, Section, Sections

# Megatron's and transformers', against a division by zero.
_LEAST_SUM = 1e-20


class Routing(NamedTuple):
    """The experts of each token, ascending, int64 [t, k]; the tokens of each expert, int64 [e]; the weights of experts,
    FP32 [t, k]; and the auxiliary loss of each sequence, FP32 (None: without gradients, or it is off)."""

    expert_tk: Tensor
    counts_e: Tensor
    weight_tk: Tensor
    loss: Tensor | None


class Router(nn.Module):
    """Chooses the experts of each token.

    load, entropy: if they are not None, a forward pass adds the tokens of each expert (int64 [e]), and the sum over
    tokens of the entropy of p in nats (FP64 0-dim). A recomputation adds nothing.
    """

    bias: Tensor
    load: Tensor | None = None
    entropy: Tensor | None = None

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.weight = new_parameter((config.moe_num_experts, config.hidden_dim), mesh)
        self.register_buffer("bias", torch.empty(config.moe_num_experts))

    def initial_values(self) -> dict[str, Rule]:
        return {"weight": lambda draws: draws.normal(self.config.init_std), "bias": lambda draws: 0.0}

    def forward(self, x_td: Tensor, sequence_length: int) -> Routing:
        config, weight_ed = self.config, local_parameter(self.weight)
        if not self.mesh.sequence_parallel:  # else the step sums the ranks' gradients
            weight_ed = enter_tensor_parallel(weight_ed, self.mesh)
        logits_te: Tensor = _Logits.apply(x_td, weight_ed)
        s_te = logits_te.sigmoid() if config.moe_score == "sigmoid" else logits_te.softmax(-1)
        expert_tk, counts_e, balanced_be = decided(lambda: self._choose(s_te.detach(), sequence_length))
        chosen_tk = s_te.gather(1, expert_tk)
        weight_tk = chosen_tk / (chosen_tk.sum(-1, keepdim=True) + _LEAST_SUM) * config.moe_scaling
        losses = []
        if self.mesh.tensor.rank:  # of the losses, which all ranks have, the first one's gradient is enough
            logits_te, s_te = logits_te.detach(), s_te.detach()
        if config.moe_aux_loss and torch.is_grad_enabled():
            p_be = _shares(s_te).unflatten(0, (-1, sequence_length)).sum(1)
            factor = config.moe_aux_loss * config.moe_num_experts / (config.moe_top_k * sequence_length**2)
            losses.append(factor * (balanced_be * p_be).sum(-1))
        if config.moe_z_loss and torch.is_grad_enabled():
            squares_bs = logits_te.logsumexp(-1).square().unflatten(0, (-1, sequence_length))
            losses.append(config.moe_z_loss * squares_bs.mean(1))
        return Routing(expert_tk, counts_e, weight_tk, sum(losses[1:], losses[0]) if losses else None)

    def _choose(self, s_te: Tensor, sequence_length: int) -> tuple[Tensor, Tensor, Tensor]:
        """The experts of each token, the tokens of each expert, and for each sequence how often an expert is among the
        best without bias and groups, int64 [sequences, e]. Adds to `load` and `entropy`."""
        config = self.config
        choice_te = s_te + self.bias
        if config.moe_num_groups > 1:
            choice_te = choice_te.masked_fill(~_in_best_groups(choice_te, config), float("-inf"))
        expert_tk = _best(choice_te, config.moe_top_k).sort(-1).values
        balanced_sk = _best(s_te, config.moe_top_k).unflatten(0, (-1, sequence_length)).flatten(1)
        numbers_e = torch.arange(config.moe_num_experts, device=s_te.device)
        counts_e = count_tokens(expert_tk.view(1, -1), numbers_e)[0]
        if self.load is not None:
            self.load += counts_e
        if self.entropy is not None:
            p_te = _shares(s_te)
            self.entropy -= torch.xlogy(p_te, p_te).sum(dtype=torch.float64)
        return expert_tk, counts_e, count_tokens(balanced_sk, numbers_e)

    @torch.no_grad()
    def balance(self, load: Tensor) -> None:
        """Move the bias after a step. load: tokens of each expert in the global batch, int64 [e]."""
        if rate := self.config.moe_bias_rate:
            below_mean = torch.sign(load.sum() - load * len(load))
            moved = self.bias.to(torch.float64) + rate * below_mean
            self.bias.copy_(moved - moved.mean())


class _Logits(Function):
    """x W^T in the dtype of W (FP32). Autograd would save x in FP32."""

    @staticmethod
    def forward(ctx: Any, x_td: Tensor, weight_ed: Tensor) -> Tensor:
        ctx.save_for_backward(x_td, weight_ed)
        return F.linear(x_td.to(weight_ed.dtype), weight_ed)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (dlogits_te,), (x_td, weight_ed) = grad_outputs, ctx.saved_tensors
        return (dlogits_te @ weight_ed).to(x_td.dtype), dlogits_te.t() @ x_td.to(weight_ed.dtype)


def _shares(s_te: Tensor) -> Tensor:
    """p, the scores divided by their sum."""
    return s_te / (s_te.sum(-1, keepdim=True) + _LEAST_SUM)


def _best(x: Tensor, count: int) -> Tensor:
    """Where the `count` largest of each row are, of equal ones the first: torch.topk leaves open which."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _in_best_groups(choice_te: Tensor, config: ModelConfig) -> Tensor:
    """Whether an expert is in the groups that a token may choose from, bool [t, e]."""
    of_group = 2 if config.moe_group_score == "top_2" else config.moe_top_k // config.moe_top_groups
    choice_tge = choice_te.unflatten(-1, (config.moe_num_groups, -1))
    score_tg = choice_tge.topk(of_group).values.sum(-1)
    mask_tg = torch.zeros_like(score_tg, dtype=torch.bool).scatter_(1, _best(score_tg, config.moe_top_groups), True)
    return mask_tg[..., None].expand_as(choice_tge).flatten(1)


def count_tokens(expert_bn: Tensor, numbers_e: Tensor) -> Tensor:
    """How often each expert is in a row, [b, n] -> [b, e], int64. Unlike bincount it waits for no GPU."""
    return (expert_bn[..., None] == numbers_e).sum(1)


class Order(NamedTuple):
    """Rows of tokens, sorted by expert and then by token. token_n: the token of each row. row_tk: the rows of each
    token. expert_n: the expert of each row, int16. choice_n: its place in a flat [t, k]. The others are int64."""

    token_n: Tensor
    row_tk: Tensor
    expert_n: Tensor
    choice_n: Tensor

    @classmethod
    def of(cls, expert_tk: Tensor) -> Order:
        """The order of the rows of `Routing.expert_tk`."""
        expert_n, choice_n = expert_tk.flatten().to(torch.int16).sort(stable=True)  # a quarter of a radix sort's passes
        row_n = torch.empty_like(choice_n).scatter_(0, choice_n, torch.arange(len(choice_n), device=choice_n.device))
        return cls(choice_n // expert_tk.shape[1], row_n.view_as(expert_tk), expert_n, choice_n)


def held_rows(counts_e: Tensor, total: int, parts: int) -> int:
    """The rows of the experts that one of `parts` tensor-parallel ranks has. Waits for the device if there are others.

    counts_e: int64, the rows of each of these experts. total: rows of all experts.
    """
    return total if parts == 1 else int(counts_e.sum())


def sum_of_rows(y_nd: Tensor, row_tk: Tensor, weight_tk: Tensor | None) -> Tensor:
    """[t, d]: the (weighted) sum of the rows of each token, added in FP32 in the order of the experts."""
    dtype = torch.promote_types(y_nd.dtype, torch.float32)
    total = torch.zeros(len(row_tk), y_nd.shape[1], dtype=dtype, device=y_nd.device)
    for k in range(row_tk.shape[1]):
        row_td = y_nd[row_tk[:, k]].to(dtype)
        total = total + (row_td if weight_tk is None else row_td * weight_tk[:, k, None])
    return total.to(y_nd.dtype)


def gradients_of_weighted(
    dy_td: Tensor, y_nd: Tensor, row_tk: Tensor, weight_tk: Tensor, token_n: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the weighted `sum_of_rows`: the gradients of y [n, d] and of the weights [t, k]."""
    weight_n = torch.empty_like(weight_tk).flatten().scatter_(0, row_tk.flatten(), weight_tk.flatten())
    dy_nd = dy_td[token_n].to(weight_tk.dtype)
    dweight_n = (dy_nd * y_nd).sum(-1)
    return (dy_nd * weight_n[:, None]).to(y_nd.dtype), dweight_n[row_tk]


def weighted_squared_relu(x_nf: Tensor, weight_n: Tensor) -> Tensor:
    """weight relu(x)^2, [n, f]; multiplied in the weights' dtype (FP32), returned in that of x."""
    return (x_nf.relu().square() * weight_n[:, None]).to(x_nf.dtype)


def weighted_swiglu(layout: Layout, groups: int, x_nf: Tensor, weight_n: Tensor) -> Tensor:
    """weight silu(gate) up, [n, f]; as `weighted_squared_relu`."""
    return (swiglu(layout, groups, x_nf) * weight_n[:, None]).to(x_nf.dtype)


def dispatch(x_td: Tensor, token_n: Tensor, row_tk: Tensor, sum_rows: Callable[..., Tensor]) -> Tensor:
    """The rows of an `Order`, [n, d], or its first ones. sum_rows: `sum_of_rows`, compiled or not."""
    return _Dispatch.apply(x_td, token_n, row_tk, sum_rows)  # type: ignore[return-value]


class _Dispatch(Function):
    """The gradient of a token is the sum over its rows, in FP32."""

    @staticmethod
    def forward(ctx: Any, x_td: Tensor, token_n: Tensor, row_tk: Tensor, sum_rows: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(row_tk)
        ctx.sum_rows = sum_rows
        return x_td[token_n]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (row_tk,) = ctx.saved_tensors
        return ctx.sum_rows(_with_zeros(grad_outputs[0], row_tk.numel()), row_tk, None), None, None, None


def _with_zeros(x_nd: Tensor, rows: int) -> Tensor:
    """x and then zeros, [rows, d]."""
    return x_nd if len(x_nd) == rows else F.pad(x_nd, (0, 0, 0, rows - len(x_nd)))


class _Combine(Function):
    """`sum_of_rows`, with weights or without. Autograd's gradient of a gather would be summed in no fixed order."""

    @staticmethod
    def forward(
        ctx: Any, y_nd: Tensor, weight_tk: Tensor | None, order: Order, sum_rows: Callable[..., Tensor],
        gradients: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:  # fmt: skip
        tensors = (None, None) if weight_tk is None else (y_nd, weight_tk)
        ctx.save_for_backward(order.row_tk, order.token_n, *tensors)
        ctx.gradients = gradients
        return sum_rows(y_nd, order.row_tk, weight_tk)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        row_tk, token_n, y_nd, weight_tk = ctx.saved_tensors
        if weight_tk is None:
            return grad_outputs[0][token_n], None, None, None, None
        return *ctx.gradients(grad_outputs[0], y_nd, row_tk, weight_tk, token_n), None, None, None


def _hugging_face(config: ModelConfig) -> Sections:
    width, inner, hidden = _width(config), config.moe_ffn_dim, config.hidden_dim
    shapes = {"up_proj": (inner, width), "down_proj": (width, inner)}
    return {
        "router.weight": [Section("gate.weight", (config.moe_num_experts, hidden), fp32=True)],
        "router.bias": [Section("gate.e_score_correction_bias", (config.moe_num_experts,), fp32=True)],
        **{
            f"experts_{name.removesuffix('_proj')}.weight": [
                Section(f"experts.{expert}.{name}.weight", shape, expert=expert)
                for expert in range(config.moe_num_experts)
            ]
            for name, shape in shapes.items()
        },
        **_beside_experts(config, MLP.hugging_face),
    }


def _beside_experts(config: ModelConfig, ffn: HuggingFaceBlock | MegatronBlock | None) -> Sections:
    """The shared expert, which is an `ffn`, and the latent projections."""
    assert ffn is not None
    hidden, latent, shared = config.hidden_dim, config.moe_latent_dim, ffn.sections(_shared(config)).items()
    sections = {f"shared_experts.{name}": [part.inside("shared_experts") for part in parts] for name, parts in shared}
    if latent:
        sections["to_latent.weight"] = [Section("fc1_latent_proj.weight", (latent, hidden))]
        sections["from_latent.weight"] = [Section("fc2_latent_proj.weight", (hidden, latent))]
    return sections


def _megatron(config: ModelConfig) -> Sections:
    """Tensors of all experts; linear_fc1 of gated ones is `[gate | up]`."""
    count, width, inner, hidden = config.moe_num_experts, _width(config), config.moe_ffn_dim, config.hidden_dim
    gated = config.moe_activation == "swiglu"
    order = gate_up_order(replace(config, ffn_dim=inner)).argsort() if gated else None
    return {
        "router.weight": [Section("router.weight", (count, hidden), fp32=True)],
        "router.bias": [Section("router.expert_bias", (count,), fp32=True)],
        "experts_up.weight": [Section("experts.experts.linear_fc1.weight", (count, _up_rows(config), width), order)],
        "experts_down.weight": [Section("experts.experts.linear_fc2.weight", (count, width, inner))],
        **_beside_experts(config, _ffn(config).megatron),
    }


def _megatron_sizes(shape: Callable[[str], tuple[int, ...]], known: Mapping[str, Any]) -> dict[str, Any]:
    experts, rows, width = shape("experts.experts.linear_fc1.weight")
    inner, hidden = shape("experts.experts.linear_fc2.weight")[2], shape("router.weight")[1]
    return {
        "moe_num_experts": experts,
        "moe_ffn_dim": inner,
        "moe_shared_ffn_dim": shape("shared_experts.linear_fc2.weight")[1],
        "moe_latent_dim": 0 if width == hidden else width,
        "moe_activation": "swiglu" if rows == 2 * inner else "squared_relu",
        "moe_weight": "before_down",
        "moe_group_score": "top_share" if known["moe_num_groups"] > 1 else "top_2",
    }


class Experts(GroupedLinear):
    """A projection of all experts. std: of its initial values."""

    def __init__(
        self, config: ModelConfig, in_features: int, out_features: int, mesh: ParallelMesh, std: float
    ) -> None:
        super().__init__(config.moe_num_experts, in_features, out_features, mesh)
        self.std = std

    def initial_values(self) -> dict[str, Rule]:
        return {"weight": lambda draws: draws.normal(self.std)}


class MoE(Mixer):
    """Experts, their router, and the shared expert. Expert-parallel ranks divide the experts; each has the others."""

    name = "expert"
    hugging_face = HuggingFaceBlock(
        types=("moe",),
        sections=_hugging_face,
        settings={
            "moe_num_experts": ("n_routed_experts", 8),
            "moe_top_k": ("num_experts_per_tok", 2),
            "moe_ffn_dim": ("moe_intermediate_size", 7688),
            "moe_shared_ffn_dim": ("moe_shared_expert_intermediate_size", 7688),
            "moe_latent_dim": ("moe_latent_size", None),
            "moe_scaling": ("routed_scaling_factor", 1.0),
            "moe_num_groups": ("n_group", 1),
            "moe_top_groups": ("topk_group", 1),
        },
        # vLLM multiplies the shared expert's width by n_shared_experts.
        fixed={"mlp_hidden_act": "relu2", "mlp_bias": False, "norm_topk_prob": True, "n_shared_experts": 1},
        without_key={"moe_score": "sigmoid", "moe_group_score": "top_2", "moe_activation": "squared_relu"},
        keys_always=False,  # engines take a model with n_routed_experts for one with experts
    )
    megatron = MegatronBlock(
        module="mlp",
        linears=(
            *("fc1_latent_proj", "fc2_latent_proj", "experts.experts.linear_fc1", "experts.experts.linear_fc2"),
            *("shared_experts.linear_fc1", "shared_experts.linear_fc2"),
        ),
        norm="pre_mlp_layernorm.weight",
        sections=_megatron,
        sizes=_megatron_sizes,
        told=("moe_top_k", "moe_scaling", "moe_num_groups", "moe_top_groups"),
        # The rule for groups differs only if there are some.
        fixed=lambda config: {
            "moe_score": "sigmoid",
            "moe_group_score": "top_2" if config.moe_num_groups == 1 else "top_share",
        },
        arguments={
            "moe_num_experts": ("num_experts", None),
            "moe_top_k": ("moe_router_topk", None),
            "moe_ffn_dim": ("moe_ffn_hidden_size", None),
            "moe_shared_ffn_dim": ("moe_shared_expert_intermediate_size", None),
            "moe_latent_dim": ("moe_latent_size", 0),
            "moe_score": ("moe_router_score_function", None),
            "moe_scaling": ("moe_router_topk_scaling_factor", 1.0),
            "moe_num_groups": ("moe_router_num_groups", 1),
            "moe_top_groups": ("moe_router_group_topk", 1),
            "moe_bias_rate": ("moe_router_bias_update_rate", None),
            "moe_aux_loss": ("moe_aux_loss_coeff", None),
            "moe_z_loss": ("moe_z_loss_coeff", 0.0),
        },
        constants={
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
        },
        gated=lambda config: config.moe_activation == "swiglu",
    )

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, execution: Execution = PLAIN) -> None:
        super().__init__(config, mesh, execution)
        self.mesh, self.num_experts = mesh, config.moe_num_experts
        self.before_down = config.moe_weight == "before_down"
        self.router = Router(config, mesh)
        width, inner = _width(config), config.moe_ffn_dim
        latent = bool(config.moe_latent_dim)
        self.to_latent = ColumnParallelLinear(config.hidden_dim, width, mesh) if latent else None
        self.experts_up = Experts(config, width, _up_rows(config), mesh, config.init_std)
        self.experts_down = Experts(config, inner, width, mesh, config.init_std * config.num_blocks**-0.5)
        self.from_latent = RowParallelLinear(width, config.hidden_dim, mesh) if latent else None
        self.shared_experts = _ffn(config)(_shared(config), mesh, execution)
        exchanged = mesh.experts is not None or mesh.tensor.size > 1
        self._activation: Callable[..., Tensor] = activation(execution, rows_vary=exchanged)
        weighted = execution.pure(weighted_squared_relu, rows_vary=exchanged)
        self._weighted: Callable[..., Tensor] = execution.recomputed(weighted)
        if config.moe_activation == "swiglu":
            packed = GatedMLP.linears(replace(config, ffn_dim=inner))[0]
            pure = [execution.recomputed(execution.pure(each, exchanged)) for each in (swiglu, weighted_swiglu)]
            self._activation, self._weighted = (partial(each, (packed.sections,), packed.groups) for each in pure)
        self._dispatch = execution.recomputed(dispatch)
        self._sum_rows, self._gradients = execution.pure(sum_of_rows), execution.pure(gradients_of_weighted)
        self._segments = execution.kernel("segments", Segments.of_experts)
        self._held_rows = execution.kernel("held_rows", held_rows)
        self._exchange: Callable[..., Any] = NoExchange
        if mesh.experts is not None:
            self._exchange = partial(execution.kernel("exchange", Exchange), mesh.experts)

    def forward(self, x_td: Tensor, sequence_length: int, documents: Documents | None = None) -> Any:
        all_td = enter_tensor_parallel(x_td, self.mesh)
        routing = self.router(all_td, sequence_length)
        expert_tk, counts_e = self._of_held(routing)
        order, total = Order.of(expert_tk), expert_tk.numel()
        first_token = self.experts_up.context.step_state.captured_micro_batch * len(all_td)
        latent_td = all_td if self.to_latent is None else gather_features(self.to_latent(x_td), self.mesh)
        rows = self._held_rows(counts_e, total, self.mesh.tensor.size)
        token_n = order.token_n[:rows]
        position_n = torch.add(order.expert_n[:rows], first_token + token_n, alpha=self.num_experts)
        exchange = self._exchange(counts_e, position_n)
        x_nd = self._dispatch(latent_td, token_n, order.row_tk, self._sum_rows)
        # The host waits for other ranks' counts here. The halves of the shared expert run beside the messages.
        x_nd = exchange.to_experts(x_nd)
        shared_tf = self.shared_experts.inner(x_td)
        segments = self._segments(exchange.counts, exchange.positions)
        inner_nf = self.experts_up(exchange.arrived(x_nd), segments)
        if self.before_down:
            weight_n = routing.weight_tk.flatten()[order.choice_n[:rows]]
            weight_n = exchange.arrived(exchange.to_experts(weight_n[:, None]))[:, 0]
            inner_nf = self._weighted(inner_nf, weight_n)
        else:
            inner_nf = self._activation(inner_nf)
        y_nd = exchange.from_experts(self.experts_down(inner_nf, segments))
        shared_td = self.shared_experts.down_proj(shared_tf)
        weight_tk = None if self.before_down else routing.weight_tk
        y_nd = _with_zeros(exchange.arrived(y_nd, back=True), total)
        y_td = _Combine.apply(y_nd, weight_tk, order, self._sum_rows, self._gradients)
        if self.from_latent is None:
            y_td = leave_tensor_parallel(y_td, self.mesh)
        else:
            y_td = self.from_latent(scatter_features(y_td, self.mesh))
        y_td = y_td + shared_td
        return y_td if routing.loss is None else (y_td, routing.loss)

    def _of_held(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """`expert_tk` with the number of experts instead of those that other tensor-parallel ranks have, and `counts_e`
        without these."""
        ranks, held = self.mesh.tensor, self.experts_up.num_held
        if ranks.size == 1:
            return routing.expert_tk, routing.counts_e
        is_held = routing.expert_tk // held % ranks.size == ranks.rank
        counts_e = routing.counts_e.view(-1, ranks.size, held)[:, ranks.rank].flatten()
        return routing.expert_tk.where(is_held, self.num_experts), counts_e

    def fp32_units(self) -> list[nn.Module]:
        return [self.router]

    def routers(self) -> list[nn.Module]:
        return [self.router]

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        for key in ("moe_ffn_dim", "moe_shared_ffn_dim", "moe_latent_dim"):
            check_tiles(config, key)
        experts, k = config.moe_num_experts, config.moe_top_k
        if k == 1:
            raise ConfigError(
                "model.moe_top_k=1: a token's only weight is always model.moe_scaling, so the router would not learn; "
                "use 2 or more"
            )
        check_multiple(config, "moe_num_experts", "moe_num_groups")
        groups, top, in_group = config.moe_num_groups, config.moe_top_groups, experts // config.moe_num_groups
        if top > groups:
            raise ConfigError(f"model.moe_top_groups={top} is more than model.moe_num_groups={groups}; use {groups}")
        if k > top * in_group:
            raise ConfigError(
                f"model.moe_top_k={k} is more than the {top * in_group} experts in model.moe_top_groups={top} of "
                f"{groups} groups; lower it, or raise model.moe_num_experts={experts}"
            )
        if groups == 1:
            if config.moe_group_score != "top_2":
                raise ConfigError(
                    f"model.moe_group_score={config.moe_group_score} has no effect with model.moe_num_groups=1; leave "
                    "it at top_2"
                )
            return
        if config.moe_group_score == "top_2" and in_group < 2:
            raise ConfigError(
                f"model.moe_num_groups={groups} leaves one of {experts} experts in a group, and model.moe_group_score="
                f"top_2 adds two; use {experts // 2} or fewer"
            )
        if config.moe_group_score == "top_share" and k % top:
            raise ConfigError(
                f"model.moe_group_score=top_share: model.moe_top_groups={top} does not divide model.moe_top_k={k}; "
                "change one of them"
            )

    @classmethod
    def shared_by_tensor_ranks(cls, config: ModelConfig) -> dict[str, tuple[int, int]]:
        shared = dict(cls.shared_by_expert_ranks(config))
        if config.moe_latent_dim:
            shared |= tiles_of(config, "moe_latent_dim")
        for what, (count, _) in _ffn(config).shared_by_tensor_ranks(_shared(config)).items():
            key = what.replace("model.ffn_dim", "model.moe_shared_ffn_dim")
            shared[key] = count, config.moe_shared_ffn_dim
        return shared

    @classmethod
    def shared_by_expert_ranks(cls, config: ModelConfig) -> dict[str, tuple[int, int]]:
        return {"model.moe_num_experts": (config.moe_num_experts, config.moe_num_experts)}

    @classmethod
    def linears(cls, config: ModelConfig) -> Sequence[LinearShape]:
        width, inner, latent = _width(config), config.moe_ffn_dim, config.moe_latent_dim
        width_key, num_experts = "model.moe_latent_dim" if latent else "model.hidden_dim", config.moe_num_experts
        experts: Any = {"experts": num_experts, "active": config.moe_top_k / num_experts}
        title = "the experts' up projection"
        up = LinearShape("experts_up", 0, width, _up_rows(config), input_key=width_key, title=title, **experts)
        title = "the experts' down projection"
        down = LinearShape("experts_down", 0, inner, width, input_key="model.moe_ffn_dim", title=title, **experts)
        linears = [up, down]
        if latent:
            to_latent = input_projection("to_latent", config, latent)
            title = "the projection from latent experts"
            from_latent = output_projection("from_latent", config, latent, "model.moe_latent_dim", title)
            linears = [to_latent, up, down, from_latent]
        for shape in _ffn(config).linears(_shared(config)):
            key = shape.input_key.replace("model.ffn_dim", "model.moe_shared_ffn_dim")
            linears.append(replace(shape, name=f"shared_experts.{shape.name}", input_key=key))
        return linears

    @classmethod
    def flops_per_token(cls, config: ModelConfig, sequence_length: int) -> int:
        return 2 * cls.other_parameters(config)

    @classmethod
    def other_parameters(cls, config: ModelConfig) -> int:
        return config.moe_num_experts * config.hidden_dim


def _width(config: ModelConfig) -> int:
    """In which experts read and write."""
    return config.moe_latent_dim or config.hidden_dim


def _ffn(config: ModelConfig) -> type[MLP]:
    """The kind of every expert."""
    return GatedMLP if config.moe_activation == "swiglu" else MLP


def _up_rows(config: ModelConfig) -> int:
    """Outputs of an expert's up projection."""
    return config.moe_ffn_dim * (2 if config.moe_activation == "swiglu" else 1)


def _shared(config: ModelConfig) -> ModelConfig:
    """The configuration whose FFN is the shared expert."""
    return replace(config, ffn_dim=config.moe_shared_ffn_dim)
