"""FSDP gathers 4-bit codes of quantized weights instead of BF16 copies.

A linear whose weight has one set of codes for fprop and dgrad (16x16 blocks, nearest rounding, no transform) multiplies
by these codes and by nothing else of the weight. So each rank quantizes its shard of the FP32 master, and what is
gathered are rows of codes and of scales (`quantization/square_blocks.py`): 0.56 bytes a parameter instead of 2. They
are gathered once a step, at the linear's first use, and stay until the last backward pass, whatever `parallel.reshard`
says, since they are all that is kept of the weight (`precision/emulated.py`).

    root's forward pass, weights changed    maxima of all shards' blocks; one MAX reduction of those that ranks share
    unit's forward pass                     codes and scales of its shards, gathered by FSDP with the unit's other
                                            parameters, as bytes
    GEMMs                                   unpack them
    last backward pass                      freed; gradients as ever: FP32, whole, reduced by FSDP

Codes do not depend on the mesh. FSDP cuts rows into equal chunks wherever that falls; a block that lies in several
ranks' rows takes the largest of their maxima, and the tensor's scale that of all ranks, tensor-parallel ones included
where the linear says so. Both go in one message a step for all linears.

What a weight is gathered as is decided before each forward pass of the model, equally on all ranks: as BF16 where the
recipe or backend in effect wants it (blocks in BF16, after a precision switch, other formats) and where the weight
itself is read (a probe, a recheck). A unit of which every linear is gathered as codes ignores
`parallel.reshard`; others obey it. Not gathered as codes: where rounding is stochastic, where W has two sets of codes
or four-over-six, or where there is one shard (nothing is sent there).

How: FSDP2 asks a parameter's local shard for `fsdp_pre_all_gather` and `fsdp_post_all_gather`, and gathers what the
first gives. Here these are attributes of the shard itself, put there and taken away, not methods of a tensor subclass:
optimizer and checkpoints see plain FP32 tensors. The gathered parameter has the weight's shape, dtype and gradient and
no memory: one NaN, seen at every place, so that a read by mistake shows. The codes hang on it, for the
linear to take (`precision/linear.py`).

The same way parameters that must never be rounded (Mamba-2's A, D and dt bias) are gathered in FP32 with their block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_fp4.parallel.fsdp_private import ShardedParameter, initialize_lazily, is_last_backward, parameters_of
from megatron_fp4.parallel.layers import QuantizedLinear
from megatron_fp4.precision.emulated import PackedWeight, attach_codes
from megatron_fp4.precision.fp32_gradients import accept_fp32_gradient
from megatron_fp4.precision.recipe import FPROP_WEIGHT
from megatron_fp4.quantization.rounding import E4M3_MAX
from megatron_fp4.quantization.square_blocks import RowBlocks, block_maxima, quantize_rows
from megatron_fp4.quantization.tensor import all_reduce_maxima, tensor_decode_scale

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def gather_in_fp32(unit: FSDPModule, modules: Sequence[nn.Module]) -> None:
    """Let `unit` gather the parameters of `modules`, which belong to it, as they are."""
    held = {id(module) for module in modules}
    mine = [InFP32(parameter) for parameter in parameters_of(unit) if id(parameter.module) in held]

    def before_forward(*_: Any) -> None:
        initialize_lazily(unit)  # which may put other tensors in the place of shards
        for one in mine:
            one.parameter.set_hooks(one)

    if mine:
        assert isinstance(unit, nn.Module)
        unit.register_forward_pre_hook(before_forward, prepend=True)


def weight_specs(units: Iterable[nn.Module]) -> dict[QuantizedLinear, DTensorSpec | None]:
    """Where the weights of the quantized linears in `units` lie before FSDP shards them (None: no DTensor)."""
    linears = [module for unit in units for module in unit.modules() if isinstance(module, QuantizedLinear)]
    return {linear: linear.weight._spec if isinstance(linear.weight, DTensor) else None for linear in linears}


def gather_codes(
    model: nn.Module,
    units: Sequence[nn.Module],
    specs: dict[QuantizedLinear, DTensorSpec | None],
    shards: DeviceMesh,
    compute_dtype: torch.dtype,
    reshard: bool,
) -> None:
    """Let the `units` of a sharded `model` gather codes of weights, where linears multiply by codes.

    specs: `weight_specs`. shards: the axis that FSDP shards over, of several ranks. reshard: what units do that gather
    anything else.
    """
    gathering = []
    for unit in units:
        assert isinstance(unit, FSDPModule)
        linears = [(one, one.module) for one in parameters_of(unit) if isinstance(one.module, QuantizedLinear)]
        if linears:
            mine = [GatheredWeight(one, of, specs[of], shards, compute_dtype) for one, of in linears]
            gathering.append((unit, mine))
    if gathering:
        together = GatheredCodes(model, gathering, shards, reshard)
        # In front of FSDP's own hook, which gathers.
        model.register_forward_pre_hook(together.before_forward, prepend=True)


class InFP32:
    """A parameter that is gathered as it is."""

    def __init__(self, parameter: ShardedParameter) -> None:
        self.parameter = parameter

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        """The shard with FSDP's padding."""
        return (self.parameter.padded_shard,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The parameter is the message itself."""
        return outputs[0], ()


class GatheredWeight:
    """The weight of one linear, gathered as codes while `as_codes`, else as FSDP does by itself.

    maxima: FP32 [blocks, in / block] of this rank's rows. amax, scale: FP32 0-dim, of NVFP4.
    """

    def __init__(
        self,
        parameter: ShardedParameter,
        linear: QuantizedLinear,
        spec: DTensorSpec | None,
        shards: DeviceMesh,
        compute_dtype: torch.dtype,
    ) -> None:
        self.parameter, self.spec, self.context, self.dtype = parameter, spec, linear.context, compute_dtype
        self.num_rows, self.num_columns = parameter.size
        self.shard = shards.get_local_rank()
        self.chunk = -(-self.num_rows // shards.size())  # FSDP2's rows of a rank, of which the last have fewer
        self.as_codes = False
        self.blocks = self.all_blocks = RowBlocks("nvfp4", self.num_rows, self.num_rows, 0, 0)
        self.maxima: Tensor | None = None
        self.amax: Tensor | None = None
        self.scale: Tensor | None = None
        self._gathered: nn.Parameter | None = None
        # What the weight was gathered into, and through which messages, while it last was the other of codes and BF16.
        self._other: tuple[nn.Parameter | None, list[Tensor]] = (None, [])

    @property
    def rows(self) -> Tensor:
        """This rank's rows of the FP32 master, [rows, in]."""
        return self.parameter.shard.detach()

    def shared_blocks(self) -> list[int]:
        """The blocks whose rows several ranks hold, in order."""
        cuts = range(self.chunk, self.num_rows, self.chunk)
        block_of = self.all_blocks.block_of
        return sorted({block_of(row) for row in cuts if block_of(row - 1) == block_of(row)})

    def gather_as(self, codes: bool) -> None:
        """Gather codes, or else what FSDP gathers by itself, from the next time on; the parameter must be sharded now.
        Its gradient so far moves along if it has been gathered both ways before."""
        if codes:
            context = self.context
            group_rows = self.num_rows // context.num_groups
            padded = context.backend.alignment(context.recipe).padded_group(group_rows, context.num_groups)
            form = context.recipe[FPROP_WEIGHT].format
            if form != self.all_blocks.format:  # whose messages have other sizes
                if self.as_codes:
                    self.parameter.forget_messages()
                else:
                    self._other = self._other[0], []
            self.all_blocks = RowBlocks(form, group_rows, padded, 0, self.num_rows)
            first, end = (min(self.chunk * i, self.num_rows) for i in (self.shard, self.shard + 1))
            self.blocks, self.maxima = replace(self.all_blocks, first=first, end=end), None
        if codes != self.as_codes:
            gathered, messages = self._other
            if codes and gathered is None:
                gathered = self._placeholder()
                accept_fp32_gradient(gathered)
            self._other = self.parameter.exchange(gathered, messages)
            before = self._other[0]
            if gathered is None:
                assert getattr(before, "grad", None) is None, "the first micro-batch of a step decides"
            elif before is not None and before.grad is not None:
                gathered.grad, before.grad = before.grad, None
            self.as_codes = codes
        if not codes:
            self.parameter.set_hooks(None)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        """Codes and scales of this rank's rows, as many as FSDP2 wants of each rank."""
        assert self.maxima is not None, "codes are gathered in forward passes of the whole model"
        device, columns = self.maxima.device, self.num_columns
        codes = torch.empty(self.chunk, columns // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(self.chunk, columns // self.blocks.block, dtype=torch.uint8, device=device)
        quantize_rows(self.rows, self.blocks, self.maxima, self.amax, (codes, scales), dtype=self.dtype)
        return (codes, scales), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> None:
        """Rows of all ranks, one after another."""
        codes, scales = (part[: self.num_rows] for part in outputs)
        assert self._gathered is not None and out is self._gathered
        attach_codes(self._gathered, PackedWeight(codes, scales, self.all_blocks, scale=self.scale, amax=self.amax))

    def _placeholder(self) -> nn.Parameter:
        """A parameter of the weight's shape, dtype and placement that is NaN everywhere."""
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.parameter.shard.device)
        seen: Tensor = nan.expand(self.num_rows, self.num_columns)
        if (spec := self.spec) is not None:
            assert spec.tensor_meta is not None
            spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=self.dtype))
            seen = DTensor(seen, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
        self._gathered = nn.Parameter(seen, requires_grad=self.parameter.sharded.requires_grad)
        return self._gathered


class GatheredCodes:
    """All weights of a model that may be gathered as codes: decides for each, and brings maxima together."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[tuple[FSDPModule, list[GatheredWeight]]],
        shards: DeviceMesh,
        reshard: bool,
    ) -> None:
        assert isinstance(model, FSDPModule)
        self.model, self.units, self.shards, self.reshard = model, units, shards, reshard
        self.weights = [weight for _, weights in units for weight in weights]
        self._decided: list[tuple[Any, ...]] = []
        self._version: int | None = None
        self._maxima = _SharedMaxima([], shards)

    def before_forward(self, *_: Any) -> None:
        """Where recipes, backends, probes or watchers changed, decide what is gathered as codes; where these or weights
        did, measure the maxima, a collective."""
        initialize_lazily(self.model)
        contexts = [weight.context for weight in self.weights]
        deciding = [(context.recipe, context.backend, context.probe, context.watcher) for context in contexts]
        version = contexts[0].step_state.weights_version
        changed = deciding != self._decided
        if changed:
            self._decide()
            self._decided = deciding
        if changed or version != self._version:
            for unit, weights in self.units:
                if any(weight.as_codes for weight in weights):
                    unit.reshard()  # nothing, unless they were gathered and not computed with
            for weight in self.weights:
                if weight.as_codes:  # again: loading may have put another tensor in the shard's place
                    weight.parameter.set_hooks(weight)
            self._maxima.measure()
            self._version = version
        if self.reshard:
            # Codes stay until the optimizer wants shards.
            is_last = is_last_backward(self.model)
            for unit, weights in self.units:
                if all(weight.as_codes for weight in weights):
                    unit.set_reshard_after_backward(is_last, recurse=False)

    def _decide(self) -> None:
        for unit, weights in self.units:
            unit.reshard()
            for weight in weights:
                weight.context.weight_cache = None  # its codes change, or where they lie
                weight.gather_as(weight.context.gathers_codes)
            stay = not self.reshard or all(weight.as_codes for weight in weights)
            unit.set_reshard_after_forward(not stay, recurse=False)
        self._maxima = _SharedMaxima([weight for weight in self.weights if weight.as_codes], self.shards)


class _SharedMaxima:
    """The largest magnitudes that ranks exchange: of weights, and of blocks whose rows several ranks hold.

    One message: the maxima of the weights, then those of shared blocks [blocks, in / block], weight after weight.
    """

    def __init__(self, weights: list[GatheredWeight], shards: DeviceMesh) -> None:
        # Those that tensor-parallel ranks share as well come first.
        self.weights = sorted(weights, key=lambda weight: weight.context.amax_group("weight") is None)
        groups = [weight.context.amax_group("weight") for weight in self.weights]
        self.group, self.num_tensor_parallel = shards.get_group(), sum(group is not None for group in groups)
        self.tensor_parallel = groups[0] if self.num_tensor_parallel else None
        self._message = self._scales = torch.empty(0)
        self._own: list[Tensor] = []  # this rank's maxima of shared blocks, and where they are in the message
        self._slots: list[Tensor] = []
        self._numbers: list[Tensor] = []  # amax and scale of each weight, and where they are in message and scales
        self._measured: list[Tensor] = []

    def measure(self) -> None:
        """Maxima of this rank's rows, then those of all ranks."""
        if not self.weights:
            return
        for weight in self.weights:
            weight.maxima = block_maxima(weight.rows, weight.blocks, weight.maxima, dtype=weight.dtype)
        if not self._message.numel():
            self._lay_out()
        message, count = self._message, len(self.weights)
        message.zero_()
        maxima = {i: w.maxima for i, w in enumerate(self.weights) if w.maxima is not None and w.maxima.numel()}
        if maxima:  # a rank may be without rows
            largest = torch._foreach_norm([*maxima.values()], float("inf"))  # type: ignore[attr-defined]
            torch._foreach_copy_([message[i] for i in maxima], largest)
        if self._slots:
            torch._foreach_copy_(self._slots, self._own)
        bits = message.view(torch.int32)
        all_reduce_maxima(bits, self.group)
        if self.tensor_parallel is not None:
            all_reduce_maxima(bits[: self.num_tensor_parallel], self.tensor_parallel)
        if self._slots:
            torch._foreach_copy_(self._own, self._slots)
        self._scales.copy_(tensor_decode_scale(message[:count], E4M3_MAX))
        if self._numbers:
            torch._foreach_copy_(self._numbers, self._measured)

    def _lay_out(self) -> None:
        shared = [weight.shared_blocks() for weight in self.weights]
        widths = [weight.num_columns // weight.blocks.block for weight in self.weights]
        start = count = len(self.weights)
        size, device = count + sum(len(b) * n for b, n in zip(shared, widths, strict=True)), self.weights[0].rows.device
        self._message, self._scales = torch.zeros(size, device=device), torch.zeros(count, device=device)
        for i, (weight, blocks, width) in enumerate(zip(self.weights, shared, widths, strict=True)):
            if weight.blocks.format != "nvfp4":
                weight.amax = weight.scale = None
            else:  # in memory that stays, whatever else is gathered meanwhile: CUDA graphs read it
                if weight.amax is None or weight.scale is None:
                    weight.amax, weight.scale = torch.zeros(2, device=device).unbind()
                self._numbers += [weight.amax, weight.scale]
                self._measured += [self._message[i], self._scales[i]]
            first, num_blocks = weight.blocks.first_block, weight.blocks.num_blocks
            for block in blocks:
                if num_blocks and first <= block < first + num_blocks:
                    assert weight.maxima is not None
                    self._own.append(weight.maxima[block - first])
                    self._slots.append(self._message[start : start + width])
                start += width
