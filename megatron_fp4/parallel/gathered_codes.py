"""Ranks gather 4-bit codes of quantized weights instead of BF16 copies.

If a weight has the same codes for fprop and dgrad (16x16 blocks, rounding to nearest, no transform), its linear needs
only these codes. So each rank quantizes its rows of the FP32 master, and ranks gather rows of codes and scales
(`quantization/square_blocks.py`): 0.56 bytes per parameter instead of 2. They are gathered once per step and stay until
its end, also with `parallel.reshard`, because nothing else of the weight is kept (`precision/emulated.py`).

Codes do not depend on the mesh. The rows are cut into equal chunks, anywhere. If several ranks hold rows of a block,
its maximum is the largest of theirs. The tensor's scale uses the maximum of all ranks, of tensor-parallel ones too if
the linear asks for it. One message per step exchanges both for all linears.

All ranks decide alike how each weight is gathered. It is gathered as BF16 if the current recipe or backend needs that
(BF16 blocks, after a precision switch, other formats), or if something reads the weight itself (a probe, a recheck).
Codes are not gathered with stochastic rounding, with two sets of codes of W, or with four-over-six.

A gathered parameter has the weight's shape, dtype and gradient, but no memory: it is one NaN, expanded, so a read by
mistake is noticed. The codes are attached to it, and the linear takes them from there (`precision/operands.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fp4.parallel.parameters import gathered_parameter
from megatron_fp4.parallel.reproducible import GradientTree
from megatron_fp4.precision.emulated import PackedWeight, attach_codes
from megatron_fp4.precision.operands import LinearContext
from megatron_fp4.precision.recipe import FPROP_WEIGHT
from megatron_fp4.quantization.rounding import E4M3_MAX
from megatron_fp4.quantization.square_blocks import RowBlocks, block_maxima, quantize_rows
from megatron_fp4.quantization.tensor import all_reduce_maxima, tensor_decode_scale


class WeightCodes:
    """The codes of one linear's weight, of which each rank makes those of its rows.

    size: of this rank's weight, gathered. spec: how it is placed; None: it is no DTensor. rows: returns this rank's
    rows of the FP32 master, [rows, in]. maxima: FP32 [blocks, in / block], of these rows. amax, scale: the tensor's,
    FP32 0-dim, only with NVFP4. as_codes: whether codes are gathered now.
    """

    def __init__(
        self, context: LinearContext, size: torch.Size, spec: Any, shards: DeviceMesh, dtype: torch.dtype,
        rows: Callable[[], Tensor],
    ) -> None:  # fmt: skip
        self.context, self.spec, self.dtype, self.rows, self.as_codes = context, spec, dtype, rows, False
        (self.num_rows, self.num_columns), self.shards = size, shards
        self.chunk = -(-self.num_rows // shards.size())  # rows per rank; the last ranks have fewer
        self.blocks = self.all_blocks = RowBlocks("nvfp4", self.num_rows, self.num_rows, 0, 0)
        self.maxima: Tensor | None = None
        self.amax: Tensor | None = None
        self.scale: Tensor | None = None

    @property
    def reasons(self) -> tuple[Any, ...]:
        """What it depends on whether codes are gathered, and which."""
        context = self.context
        return context.recipe, context.backend, context.probe, context.watcher

    def decide(self) -> bool:
        """Choose between codes and values; returns whether codes have another format than before."""
        self.context.weight_cache = None  # its codes change, or the memory they are in
        self.as_codes = self.context.gathers_codes
        return self.as_codes and self._follow_recipe()

    def _follow_recipe(self) -> bool:
        context, before = self.context, self.all_blocks.format
        num_groups = context.sharding.num_groups
        group_rows = self.num_rows // num_groups
        padded = context.backend.alignment(context.recipe).padded_group(group_rows, num_groups)
        self.all_blocks = RowBlocks(context.recipe[FPROP_WEIGHT].format, group_rows, padded, 0, self.num_rows)
        shard = self.shards.get_local_rank()
        first, end = (min(self.chunk * rank, self.num_rows) for rank in (shard, shard + 1))
        self.blocks, self.maxima = replace(self.all_blocks, first=first, end=end), None
        return self.all_blocks.format != before

    def shared_blocks(self) -> list[int]:
        """The blocks of which several ranks hold rows, in ascending order."""
        starts = range(self.chunk, self.num_rows, self.chunk)
        block_of = self.all_blocks.block_of
        return sorted({block_of(row) for row in starts if block_of(row - 1) == block_of(row)})

    def empty(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Memory for codes and scales of `num_rows` rows."""
        widths = self.num_columns // 2, self.num_columns // self.blocks.block
        codes, scales = (torch.empty(num_rows, w, dtype=torch.uint8, device=self.rows().device) for w in widths)
        return codes, scales

    def quantized_rows(self) -> tuple[Tensor, Tensor]:
        """Codes and scales of this rank's rows, padded to `chunk` rows."""
        assert self.maxima is not None, "`SharedMaxima.measure` comes first"
        return quantize_rows(self.rows(), self.blocks, self.maxima, self.amax, self.empty(self.chunk), dtype=self.dtype)

    def attach(self, parameter: nn.Parameter, gathered: Sequence[Tensor]) -> None:
        """Give `parameter` all ranks' codes and scales. Rows are in the order of ranks, so in the weight's."""
        codes, scales = (part[: self.num_rows] for part in gathered)
        attach_codes(parameter, PackedWeight(codes, scales, self.all_blocks, scale=self.scale, amax=self.amax))

    def placeholder(self, requires_grad: bool) -> nn.Parameter:
        """A parameter of the weight's shape, dtype and placement that is NaN everywhere and has no memory."""
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.rows().device)
        return gathered_parameter(nan.expand(self.num_rows, self.num_columns), self.spec, requires_grad)


class GatheredModel:
    """A model whose parameters data-parallel ranks gather. This class is for one rank, which has nothing to gather.

    tree: sums gradients over micro-batches with `mesh.reproducible`; None: autograd does. codes: of the weights that
    can be gathered as codes. gathered: whether the model can run. ahead: the version of weights that `gather_ahead`
    gathered for the next step.
    """

    def __init__(self, tree: GradientTree | None = None) -> None:
        self.tree, self.gathered = tree, False
        self.codes: list[WeightCodes] = []
        self.ahead: int | None = None
        self._reasons: list[Any] | None = None
        self._maxima = SharedMaxima([])

    def gather(self, weights_version: int | None = None) -> None:
        """Before the model runs. A collective. weights_version: of the shards; None: they may have changed."""

    def prepare(self, is_first: bool, is_last: bool) -> None:
        """Before a micro-batch of a step runs eagerly."""

    def reduce(self) -> None:
        """After the last micro-batch: add the gradients of all ranks to those of the shards. A collective."""
        if self.tree is not None:
            self.tree.finish()

    def gather_ahead(self) -> None:
        """Gather for the next step. A collective. If weights do not change before it, the caller sets `ahead`."""

    def release(self) -> None:
        """Give the modules the shards, also after an error."""

    def unchanged(self) -> bool:
        """Whether `_follow_reasons` would change nothing."""
        return self._reasons == [codes.reasons for codes in self.codes]

    def _follow_reasons(self) -> bool:
        """Decide anew what is gathered as codes, if what this depends on has changed; returns whether it has."""
        if self.unchanged():
            return False
        self._decide()
        self._reasons = [codes.reasons for codes in self.codes]
        self._maxima = SharedMaxima([codes for codes in self.codes if codes.as_codes])
        return True

    def _decide(self) -> None:
        """Call `decide` of all codes, and prepare for what they decide."""


class SharedMaxima:
    """The maxima that ranks exchange: of weights, and of blocks of which several ranks hold rows.

    They go in one message: the maxima of the weights, then those of shared blocks [blocks, in / block] of each weight.
    """

    def __init__(self, weights: Sequence[WeightCodes]) -> None:
        # Weights whose maximum tensor-parallel ranks share too come first.
        self.weights = sorted(weights, key=lambda weight: not weight.context.place("weight").amax_groups)
        groups = [weight.context.place("weight").amax_groups for weight in self.weights]
        self.num_tensor_parallel = sum(map(bool, groups))
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
            weight.maxima = block_maxima(weight.rows(), weight.blocks, weight.maxima, dtype=weight.dtype)
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
        all_reduce_maxima(bits, [self.weights[0].shards.get_group()])
        all_reduce_maxima(bits[: self.num_tensor_parallel], self.tensor_parallel)
        if self._block_places:
            torch._foreach_copy_(self._block_maxima, self._block_places)
        self._scales.copy_(tensor_decode_scale(message[: len(self.weights)], E4M3_MAX))
        if self._tensor_numbers:
            torch._foreach_copy_(self._tensor_numbers, self._tensor_places)

    def _lay_out(self) -> None:
        """Allocate the message, and find the place of every number in it."""
        device, num_weights = self.weights[0].rows().device, len(self.weights)
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
