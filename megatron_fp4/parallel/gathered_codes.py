"""FSDP gathers 4-bit codes of quantized weights instead of BF16 copies.

If a weight has the same codes for fprop and dgrad (16x16 blocks, rounding to nearest, no transform), its linear needs
only these codes. So each rank quantizes its shard of the FP32 master, and FSDP gathers rows of codes and scales
(`quantization/square_blocks.py`): 0.56 bytes per parameter instead of 2. They are gathered once per step, before the
unit's first forward pass, and stay until the last backward pass, also with `parallel.reshard`, because nothing else of
the weight is kept (`precision/emulated.py`).

    root's forward pass, weights changed    maxima of the shards' blocks; one MAX all-reduce of those that ranks share
    unit's forward pass                     codes and scales of its shards; FSDP gathers them as bytes, with the unit's
                                            other parameters
    GEMMs                                   unpack the codes
    last backward pass                      codes are freed; gradients are the usual ones: FP32, reduced by FSDP

Codes do not depend on the mesh. FSDP cuts the rows into equal chunks, anywhere. If several ranks hold rows of a block,
its maximum is the largest of theirs. The tensor's scale uses the maximum of all ranks, of tensor-parallel ones too if
the linear asks for it. One message per step exchanges both for all linears.

Before each forward pass of the model, all ranks decide alike how each weight is gathered. It is gathered as BF16 if the
current recipe or backend needs that (BF16 blocks, after a precision switch, other formats), or if something reads the
weight itself (a probe, a recheck). If all linears of a unit are gathered as codes, the unit ignores `parallel.reshard`.
Codes are not gathered with stochastic rounding, with two sets of codes of W, with four-over-six, or with one shard
(which sends nothing).

FSDP2 calls `fsdp_pre_all_gather` of a parameter's local shard, gathers the tensors that it returns, and gives them to
`fsdp_post_all_gather`. Here these two are attributes that are set on the shard and deleted from it, not methods of a
tensor subclass, so the optimizer and checkpoints see plain FP32 tensors. The gathered parameter has the weight's shape,
dtype and gradient, but no memory: it is one NaN, expanded, so that reading it by mistake is noticed. The codes are
attached to it, and the linear takes them from there (`precision/operands.py`).

In the same way, parameters that must never be rounded (Mamba-2's A, D, dt bias) are gathered in FP32 with their block.
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
    """Let `unit` gather in FP32 those of its parameters that belong to `modules`."""
    ids = {id(module) for module in modules}
    in_fp32 = [GatheredInFP32(parameter) for parameter in parameters_of(unit) if id(parameter.module) in ids]

    def before_forward(*_: Any) -> None:
        initialize_lazily(unit)  # it may replace shards, so the hooks are set after it
        for gathered in in_fp32:
            gathered.parameter.set_hooks(gathered)

    if in_fp32:
        assert isinstance(unit, nn.Module)
        unit.register_forward_pre_hook(before_forward, prepend=True)


def weight_specs(units: Iterable[nn.Module]) -> dict[QuantizedLinear, DTensorSpec | None]:
    """The DTensor specs of the quantized linears' weights in `units`, before FSDP shards them (None: no DTensor).
    Without those of experts, [experts, out, in], which are gathered in BF16."""
    linears = [module for unit in units for module in unit.modules() if isinstance(module, QuantizedLinear)]
    matrices = (linear for linear in linears if linear.weight.dim() == 2)
    return {linear: linear.weight._spec if isinstance(linear.weight, DTensor) else None for linear in matrices}


def gather_codes(
    model: nn.Module,
    units: Sequence[nn.Module],
    specs: dict[QuantizedLinear, DTensorSpec | None],
    shards: DeviceMesh,
    compute_dtype: torch.dtype,
    reshard: bool,
) -> None:
    """Let the `units` of a sharded `model` gather codes of the weights whose linears need only codes.

    specs: from `weight_specs`. shards: the axis that FSDP shards over, of several ranks. reshard: applies to units that
    gather anything else.
    """
    weights_of_units = []
    for unit in units:
        assert isinstance(unit, FSDPModule)
        weights = []
        for parameter in parameters_of(unit):
            if isinstance(linear := parameter.module, QuantizedLinear) and linear in specs:
                weights.append(GatheredWeight(parameter, linear, specs[linear], shards, compute_dtype))
        if weights:
            weights_of_units.append((unit, weights))
    if weights_of_units:
        codes = GatheredCodes(model, weights_of_units, shards, reshard)
        # Before FSDP's own hook, which gathers.
        model.register_forward_pre_hook(codes.before_forward, prepend=True)


class GatheredInFP32:
    """A parameter that is gathered in FP32."""

    def __init__(self, parameter: ShardedParameter) -> None:
        self.parameter = parameter

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        return (self.parameter.padded_shard,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return outputs[0], ()


class GatheredWeight:
    """The weight of one linear, gathered as codes if `as_codes`, else in BF16 by FSDP.

    maxima: FP32 [blocks, in / block], of this rank's rows. amax, scale: the tensor's, FP32 0-dim, only with NVFP4.
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
        self.chunk = -(-self.num_rows // shards.size())  # rows per rank in FSDP2; the last ranks have fewer
        self.as_codes = False
        self.blocks = self.all_blocks = RowBlocks("nvfp4", self.num_rows, self.num_rows, 0, 0)
        self.maxima: Tensor | None = None
        self.amax: Tensor | None = None
        self.scale: Tensor | None = None
        self._gathered: nn.Parameter | None = None
        # The gathered parameter and the message buffers of the form that is not in use now (codes or BF16).
        self._other: tuple[nn.Parameter | None, list[Tensor]] = (None, [])

    @property
    def rows(self) -> Tensor:
        """This rank's rows of the FP32 master, [rows, in]."""
        return self.parameter.shard.detach()

    def shared_blocks(self) -> list[int]:
        """The blocks of which several ranks hold rows, in ascending order."""
        starts = range(self.chunk, self.num_rows, self.chunk)
        block_of = self.all_blocks.block_of
        return sorted({block_of(row) for row in starts if block_of(row - 1) == block_of(row)})

    def gather_as(self, codes: bool) -> None:
        """From the next all-gather on, gather codes, or else BF16 by FSDP. The parameter must be sharded now. If it was
        gathered in both forms before, its gradient so far moves to the other form."""
        if codes:
            context = self.context
            num_groups = context.sharding.num_groups
            group_rows = self.num_rows // num_groups
            padded = context.backend.alignment(context.recipe).padded_group(group_rows, num_groups)
            code_format = context.recipe[FPROP_WEIGHT].format
            if code_format != self.all_blocks.format:  # its messages have other sizes
                if self.as_codes:
                    self.parameter.forget_messages()
                else:
                    self._other = self._other[0], []
            self.all_blocks = RowBlocks(code_format, group_rows, padded, 0, self.num_rows)
            first, end = (min(self.chunk * rank, self.num_rows) for rank in (self.shard, self.shard + 1))
            self.blocks, self.maxima = replace(self.all_blocks, first=first, end=end), None
        if codes != self.as_codes:
            gathered, messages = self._other
            if codes and gathered is None:
                gathered = self._placeholder()
                accept_fp32_gradient(gathered)
            self._other = self.parameter.exchange(gathered, messages)
            previous = self._other[0]
            if gathered is None:
                assert getattr(previous, "grad", None) is None, "only a step's first micro-batch changes the form"
            elif previous is not None and previous.grad is not None:
                gathered.grad, previous.grad = previous.grad, None
            self.as_codes = codes
        if not codes:
            self.parameter.set_hooks(None)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        """Send codes and scales of this rank's rows, padded to `chunk` rows."""
        assert self.maxima is not None, "`before_forward` of the whole model measures them"
        device, columns = self.maxima.device, self.num_columns
        codes = torch.empty(self.chunk, columns // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(self.chunk, columns // self.blocks.block, dtype=torch.uint8, device=device)
        quantize_rows(self.rows, self.blocks, self.maxima, self.amax, (codes, scales), dtype=self.dtype)
        return (codes, scales), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> None:
        """Attach the received codes to the gathered parameter. Rows are in the order of ranks, so in the weight's."""
        codes, scales = (part[: self.num_rows] for part in outputs)
        assert self._gathered is not None and out is self._gathered
        attach_codes(self._gathered, PackedWeight(codes, scales, self.all_blocks, scale=self.scale, amax=self.amax))

    def _placeholder(self) -> nn.Parameter:
        """A parameter of the weight's shape, dtype and placement that is NaN everywhere and has no memory."""
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.parameter.shard.device)
        expanded: Tensor = nan.expand(self.num_rows, self.num_columns)
        if (spec := self.spec) is not None:
            assert spec.tensor_meta is not None
            spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=self.dtype))
            expanded = DTensor(expanded, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
        self._gathered = nn.Parameter(expanded, requires_grad=self.parameter.sharded.requires_grad)
        return self._gathered


class GatheredCodes:
    """All weights of a model that may be gathered as codes. Decides how each is gathered, and measures the maxima."""

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
        self._reasons: list[tuple[Any, ...]] = []  # what the current decision follows from
        self._version: int | None = None
        self._maxima = _SharedMaxima([], shards)

    def before_forward(self, *_: Any) -> None:
        """If recipes, backends, probes or watchers changed, decide which weights are gathered as codes. If these or the
        weights changed, measure the maxima, a collective."""
        initialize_lazily(self.model)
        contexts = [weight.context for weight in self.weights]
        reasons = [(context.recipe, context.backend, context.probe, context.watcher) for context in contexts]
        version = contexts[0].step_state.weights_version
        changed = reasons != self._reasons
        if changed:
            self._decide()
            self._reasons = reasons
        if changed or version != self._version:
            for unit, weights in self.units:
                if any(weight.as_codes for weight in weights):
                    unit.reshard()  # does nothing, unless the codes were gathered but not computed with
            for weight in self.weights:
                if weight.as_codes:  # set again, because loading may have replaced the shard
                    weight.parameter.set_hooks(weight)
            self._maxima.measure()
            self._version = version
        if self.reshard:
            # Codes stay until the optimizer needs the shards.
            is_last = is_last_backward(self.model)
            for unit, weights in self.units:
                if all(weight.as_codes for weight in weights):
                    unit.set_reshard_after_backward(is_last, recurse=False)

    def _decide(self) -> None:
        for unit, weights in self.units:
            unit.reshard()
            for weight in weights:
                weight.context.weight_cache = None  # its codes change, or the memory they are in
                weight.gather_as(weight.context.gathers_codes)
            only_codes = all(weight.as_codes for weight in weights)
            unit.set_reshard_after_forward(self.reshard and not only_codes, recurse=False)
        self._maxima = _SharedMaxima([weight for weight in self.weights if weight.as_codes], self.shards)


class _SharedMaxima:
    """The maxima that ranks exchange: of weights, and of blocks of which several ranks hold rows.

    They go in one message: the maxima of the weights, then those of shared blocks [blocks, in / block] of each weight.
    """

    def __init__(self, weights: list[GatheredWeight], shards: DeviceMesh) -> None:
        # Weights whose maximum tensor-parallel ranks share too come first.
        self.weights = sorted(weights, key=lambda weight: not weight.context.place("weight").amax_groups)
        groups = [weight.context.place("weight").amax_groups for weight in self.weights]
        self.group, self.num_tensor_parallel = shards.get_group(), sum(map(bool, groups))
        self.tensor_parallel = groups[0] if groups else ()
        self._message = self._scales = torch.empty(0)  # _scales: FP32 [weights], the tensor scales
        self._block_maxima: list[Tensor] = []  # this rank's maxima of shared blocks, and their places in the message
        self._block_places: list[Tensor] = []
        self._tensor_numbers: list[Tensor] = []  # amax and scale of NVFP4 weights; their places in message and _scales
        self._tensor_places: list[Tensor] = []

    def measure(self) -> None:
        """Measure the maxima of this rank's rows, and reduce those that ranks share over these ranks."""
        if not self.weights:
            return
        for weight in self.weights:
            weight.maxima = block_maxima(weight.rows, weight.blocks, weight.maxima, dtype=weight.dtype)
        if not self._message.numel():
            self._lay_out()
        message = self._message
        message.zero_()
        maxima = {i: w.maxima for i, w in enumerate(self.weights) if w.maxima is not None and w.maxima.numel()}
        if maxima:  # a rank may have no rows
            largest = torch._foreach_norm([*maxima.values()], float("inf"))  # type: ignore[attr-defined]
            torch._foreach_copy_([message[i] for i in maxima], largest)
        if self._block_places:
            torch._foreach_copy_(self._block_places, self._block_maxima)
        bits = message.view(torch.int32)
        all_reduce_maxima(bits, [self.group])
        all_reduce_maxima(bits[: self.num_tensor_parallel], self.tensor_parallel)
        if self._block_places:
            torch._foreach_copy_(self._block_maxima, self._block_places)
        self._scales.copy_(tensor_decode_scale(message[: len(self.weights)], E4M3_MAX))
        if self._tensor_numbers:
            torch._foreach_copy_(self._tensor_numbers, self._tensor_places)

    def _lay_out(self) -> None:
        """Allocate the message, and find the place of every number in it."""
        device, num_weights = self.weights[0].rows.device, len(self.weights)
        shared = [weight.shared_blocks() for weight in self.weights]
        widths = [weight.num_columns // weight.blocks.block for weight in self.weights]
        size = num_weights + sum(len(blocks) * width for blocks, width in zip(shared, widths, strict=True))
        self._message, self._scales = torch.zeros(size, device=device), torch.zeros(num_weights, device=device)
        start = num_weights
        for i, (weight, blocks, width) in enumerate(zip(self.weights, shared, widths, strict=True)):
            if weight.blocks.format != "nvfp4":
                weight.amax = weight.scale = None
            else:  # their memory stays when the gathered formats change, because CUDA graphs read it
                if weight.amax is None or weight.scale is None:
                    weight.amax, weight.scale = torch.zeros(2, device=device).unbind()
                self._tensor_numbers += [weight.amax, weight.scale]
                self._tensor_places += [self._message[i], self._scales[i]]
            first, num_blocks = weight.blocks.first_block, weight.blocks.num_blocks
            for block in blocks:
                if num_blocks and first <= block < first + num_blocks:
                    assert weight.maxima is not None
                    self._block_maxima.append(weight.maxima[block - first])
                    self._block_places.append(self._message[start : start + width])
                start += width
