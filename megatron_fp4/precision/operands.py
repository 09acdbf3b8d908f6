"""What a linear quantizes, and how: its operands, from its recipe, its backend and its place in the mesh.

Each of the tensors x [tokens, in], W [out, in] and dy [tokens, out] is an operand of two GEMMs: as it is stored, with
the dot product along its columns, and transposed. An operand is made from the tensor, or derived from the tensor's
operand in fprop; for the backward pass it is kept, or made again from what is kept. `linear.py` says when each is made.

Tokens are padded with zeros to the multiple that the kernels require (`backend.Alignment`). So are output features,
which consist of `num_groups` equal groups (the heads of a packed projection): each group is padded by itself, so that
block boundaries depend on the model alone, not on how many ranks share the weight.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_fp4.precision import emulated
from megatron_fp4.precision import recipe as recipes
from megatron_fp4.precision.backend import Backend, BackendOperand, MakeOperand, OperandRequest, RowGroups
from megatron_fp4.precision.emulated import EMULATED, codes_of
from megatron_fp4.precision.fp32_gradients import gradient_spec, local_part, rounding_of
from megatron_fp4.precision.messages import start_all_gather
from megatron_fp4.precision.rng import StepState
from megatron_fp4.quantization.rounding import ALL, Place, RoundingKey, Span, rounding_key
from megatron_fp4.quantization.segments import Segments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Sections = tuple[tuple[str, int], ...]
"""Sections of a packed projection, in the order of the rows of a group: (name, rows in each group)."""


@dataclass(frozen=True)
class SectionRows:
    """The sections of a packed projection that are a linear of their own.

    names: of the sections. ranges: the rows of each, (first, end), in a group of `group` rows.
    """

    names: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    group: int

    @property
    def size(self) -> int:
        return sum(end - first for first, end in self.ranges)


@dataclass(frozen=True)
class Sharding:
    """How ranks share one linear.

    inputs, outputs: this rank's features in the global tensors.
    num_groups: equal groups of the local output features, each padded to complete blocks.
    section: which rows of each group of the module's weight belong to this linear; None: all.
    keep_padding: y and dy keep the padding of each group, which the caller skips, so it is not removed and added again.
    in_tokens, out_tokens: ranks that each hold a slice of the tokens of x and dx, or of y and dy; None: every rank has
        all tokens.
    """

    inputs: Span = ALL
    outputs: Span = ALL
    num_groups: int = 1
    keep_padding: bool = False
    in_tokens: ProcessGroup | None = None
    out_tokens: ProcessGroup | None = None
    section: SectionRows | None = None

    def rows_of(self, weight: Tensor) -> Tensor:
        """The rows of this linear, contiguous, of the module's local weight [out, in]; a view if they are adjacent."""
        if self.section is None:
            return weight
        strips = self.strips_of(weight)
        return (strips[0] if len(strips) == 1 else torch.cat(strips, 1)).flatten(0, 1)

    def strips_of(self, weight: Tensor) -> list[Tensor]:
        """The same rows as views: [groups, rows, in] of each section, or the weight itself."""
        if self.section is None:
            return [weight]
        groups = weight.unflatten(0, (self.num_groups, self.section.group))
        return [groups[:, first:end] for first, end in self.section.ranges]


@dataclass
class LinearContext:
    """The recipe, backend and place in the mesh of one linear.

    name, recipe, step_state, backend: set by the run's controller (plan.py).
    sharding: set by its layer.
    keeps_input: keep x itself for the backward pass and make wgrad's operand there, with the same bits: for linears
        whose input is kept anyway, or recomputed. If False, wgrad's operand is kept.
    weight_cache: (the state that it was made for, fprop's operand, dgrad's operand); None: nothing is kept.
    keeps_rounded: whether `weight_cache` may keep a weight that is only rounded; this requires a StepState that
        advances when weights change.
    probe: the linear calls its `forward(call, x, y)` with x [tokens, in] and the local y [tokens, out]. If that returns
        an object, the linear calls its `backward(dy, dx, dw)` with the local parts; None: not needed. A probe with
        `reads_weights = False` never reads a call's weight. (measure/diagnostics.py)
    watcher: gets the backend's operands and products, and returns them unchanged. (verify.Recheck)
    num_experts: of `grouped_linear`; 0: it is a `quantized_linear`. No watcher sees linears of experts.
    parts: of a packed projection that the plan splits, the linears that compute it instead of this one.
    """

    name: str = ""
    recipe: recipes.Recipe = recipes.BF16
    step_state: StepState = field(default_factory=lambda: StepState(seed=0))
    backend: Backend = EMULATED
    sharding: Sharding = Sharding()
    keeps_input: bool = False
    weight_cache: tuple[Any, Any, Any] | None = None
    keeps_rounded: bool = True
    probe: Any = None
    watcher: Any = None
    num_experts: int = 0
    parts: tuple[LinearContext, ...] = ()

    def part(self, sections: Sections, whole: Sections) -> LinearContext:
        """The context of the linear that the sections `sections` of a packed projection form. whole: all its sections.

        The part is a linear of its own: positions count its rows alone.
        """
        ends = dict(zip((name for name, _ in whole), itertools.accumulate(rows for _, rows in whole), strict=True))
        ranges = tuple((ends[name] - rows, ends[name]) for name, rows in sections)
        section = SectionRows(tuple(name for name, _ in sections), ranges, sum(rows for _, rows in whole))
        outputs = self.sharding.outputs
        assert isinstance(outputs.at, int) and outputs.at % section.group == 0, "ranks have complete groups"
        outputs = replace(outputs, at=outputs.at // section.group * section.size)
        return replace(self, sharding=replace(self.sharding, outputs=outputs, section=section), parts=())

    @property
    def gathers_codes(self) -> bool:
        """Whether ranks can gather the weight as codes, and nothing needs its values."""
        probe_reads = self.probe is not None and getattr(self.probe, "reads_weights", True)
        packs = same_weight_codes(self.recipe) and self.backend.packs(self.recipe[recipes.FPROP_WEIGHT])
        return packs and self.watcher is None and not probe_reads and not self.parts

    def place(self, tensor: str, tokens: Span = ALL, groups: RowGroups | None = None) -> Place:
        """Where this rank's part of `activation` [tokens, in], `weight` [out, in] or `gradient` [tokens, out] lies.

        tokens: those that are here. groups: how output features are padded; None: not at all. With the recipe's amax
        `shard`, ranks that share features do not share a maximum.
        """
        inputs, outputs = self.sharding.inputs, self.sharding.outputs
        if groups is not None:
            outputs = replace(outputs, at=groups.padded_indices(outputs.at))
        if self.recipe.amax != "global":
            inputs, outputs = replace(inputs, ranks=None), replace(outputs, ranks=None)
        dims = {"activation": (tokens, inputs), "weight": (outputs, inputs), "gradient": (tokens, outputs)}
        return Place(*dims[tensor])

    def key(self, step: int, micro_batch: int, operand: str) -> RoundingKey:
        """The key for one operand's draws."""
        key, keys = rounding_key(self.step_state.seed, step, micro_batch, self.name, operand), self.step_state.keys
        return key if keys is None else keys.of(self.name, operand, key)


def same_weight_codes(recipe: recipes.Recipe) -> bool:
    """Whether dgrad's weight has fprop's codes, transposed, or both are not quantized."""
    operand = recipe[recipes.FPROP_WEIGHT]
    plain = operand.rounding == "nearest" and not recipe.fprop.rht and not recipe.dgrad.rht
    square = operand.block[0] == operand.block[1] or not operand.quantized
    return operand == recipe[recipes.DGRAD_WEIGHT] and plain and square


@dataclass(frozen=True)
class Padding:
    """The tokens and output features of a linear on this rank, and the zeros that its GEMMs need after them.

    tokens, padded_tokens: those of all slices. num_groups, groups: the groups of output features and their padding.
    """

    tokens: int
    padded_tokens: int
    num_groups: int
    groups: RowGroups

    @property
    def row_groups(self) -> RowGroups | None:
        """The groups of a weight's rows; None: they have no padding."""
        return None if self.groups.padded == self.groups.kept else self.groups

    def pad_tokens(self, x: Tensor) -> Tensor:
        """[tokens, features] with padded tokens."""
        extra = self.padded_tokens - self.tokens
        return pad(x, (0, 0, 0, extra)) if extra else x

    def unpad_tokens(self, x: Tensor) -> Tensor:
        return x[: self.tokens] if self.padded_tokens != self.tokens else x

    def pad_outputs(self, y: Tensor) -> Tensor:
        """[tokens, out] with padded groups of output features; y may have the padding already."""
        extra = self.groups.padded - self.groups.kept
        if not extra or y.shape[-1] == self.num_groups * self.groups.padded:
            return y
        return pad(y.unflatten(-1, (-1, self.groups.kept)), (0, extra)).flatten(-2)

    def unpad_outputs(self, y: Tensor) -> Tensor:
        """[tokens, out] without the padding of groups."""
        if y.shape[-1] == self.num_groups * self.groups.kept:
            return y
        return y.unflatten(-1, (-1, self.groups.padded))[..., : self.groups.kept].flatten(-2)

    def pad_weight(self, w: Tensor) -> Tensor:
        """[out, in] with padded groups of output features."""
        return self.pad_outputs(w.t()).t()

    def pad(self, dy: Tensor) -> Tensor:
        """[tokens, out] with padded tokens and padded groups of output features."""
        return self.pad_tokens(self.pad_outputs(dy))


class LinearCall:
    """A forward pass of a linear and its backward pass: its position in the run, and each tensor's operands.

    weight: parameter [out, in]. x: [tokens, in], with `in_tokens` this rank's slice; only its shape, dtype and device
    are used. token_groups: by tensor (`activation`, `gradient`), the ranks that hold slices of its tokens, or None.
    slices: those whose slices are quantized before they are gathered.
    """

    segments: Segments | None = None

    def __init__(self, context: LinearContext, weight: Tensor, x: Tensor) -> None:
        self.context, self.recipe, self.backend = context, context.recipe, context.backend
        self.step, self.micro_batch = context.step_state.step, context.step_state.micro_batch
        self.device, self.dtype = x.device, x.dtype
        self._stored, self.gradient_spec = local_part(weight), gradient_spec(weight)
        self.rounding = rounding_of(weight)
        self.weight_codes = codes_of(weight)  # if codes were gathered, the master has no values
        sharding, self.alignment = context.sharding, self.backend.alignment(self.recipe)
        tokens = x.shape[0] * (1 if sharding.in_tokens is None else sharding.in_tokens.size())
        num_groups, section = sharding.num_groups, sharding.section
        outputs = self._stored.shape[0] // num_groups if section is None else section.size
        groups = RowGroups(self.alignment.padded_group(outputs, num_groups), outputs)
        self.padding = Padding(tokens, self.alignment.padded_tokens(tokens), num_groups, groups)
        self.token_groups = {"activation": sharding.in_tokens, "gradient": sharding.out_tokens}
        groups_of = self.token_groups.items()
        self.slices = {name: ranks for name, ranks in groups_of if ranks and self.sends_operands(name, ranks)}

    # ------------------------------------------------------------------------------------------- activation, gradient

    def activation_operands(self, x: Tensor, needs_wgrad: bool) -> tuple[MakeOperand, MakeOperand | None]:
        """Functions that make fprop's operand of x [tokens, in] and the operand that is kept for the backward pass
        (None: x itself is kept, or nothing). Call them in this order."""
        source, keeps = self.recipe[recipes.WGRAD_ACTIVATION].source, needs_wgrad and not self.context.keeps_input
        wgrad = recipes.WGRAD_ACTIVATION if keeps and source == "tensor" else None
        x = self.padding.pad_tokens(self.tokens_to_quantize(x, "activation"))
        keep = keeps and source == "forward", True
        make_fprop, make_wgrad = self.operand_makers(x, recipes.FPROP_ACTIVATION, wgrad, keep)
        assert make_fprop is not None
        if keeps and source != "tensor":
            make_fprop = make_wgrad = functools.cache(make_fprop)
        return make_fprop, make_wgrad

    def wgrad_activation(self, kept: Tensor | BackendOperand | None) -> MakeOperand | None:
        """A function that makes wgrad's operand from what the forward pass kept: x, fprop's operand, or wgrad's."""
        if kept is None:
            return None
        from_fprop = self.recipe[recipes.WGRAD_ACTIVATION].source != "tensor"
        if not isinstance(kept, Tensor):
            return (lambda: self.from_fprop_operand(kept, recipes.WGRAD_ACTIVATION)()) if from_fprop else (lambda: kept)
        x = self.padding.pad_tokens(self.tokens_to_quantize(kept, "activation"))
        if not from_fprop:
            return self.operand_makers(x, None, recipes.WGRAD_ACTIVATION)[1]
        make_fprop, _ = self.operand_makers(x, recipes.FPROP_ACTIVATION, None)
        assert make_fprop is not None
        return self.from_fprop_operand(make_fprop(), recipes.WGRAD_ACTIVATION)

    def gradient_operands(
        self, dy: Tensor, needs_dgrad: bool, needs_wgrad: bool
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """Functions that make dgrad's and wgrad's operand of dy [tokens, out]; None: not needed."""
        slots = recipes.DGRAD_GRADIENT if needs_dgrad else None, recipes.WGRAD_GRADIENT if needs_wgrad else None
        return self.operand_makers(self.padding.pad(self.tokens_to_quantize(dy, "gradient")), *slots)

    def sends_operands(self, tensor: str, group: ProcessGroup) -> bool:
        """Whether the ranks of `group` gather operands of slices of a tensor, and not the tensor itself. dy needs both
        operands at once, and only in 4 bits are they fewer bytes than dy; x needs one operand per pass."""
        if self.padding.tokens % (group.size() * self.alignment.tokens):  # a slice has incomplete blocks or padding
            return False
        if tensor == "activation":
            return self.recipe[recipes.WGRAD_ACTIVATION].source != "codes"
        operands = [self.recipe[slot] for slot in recipes.SLOTS_OF[tensor]]
        # MS-EDEN's kernel makes values, not codes, along the columns.
        return all(operand.in_4_bits for operand in operands) and operands[0].rounding != "ms_eden"

    def tokens_to_quantize(self, x: Tensor, tensor: str) -> Tensor:
        """The tokens of x (`activation`) or dy (`gradient`) that this rank quantizes: its slice, or all."""
        return x if tensor in self.slices else self.all_tokens(x, tensor)

    def all_tokens(self, x: Tensor, tensor: str) -> Tensor:
        """All tokens of x or dy; gathered if this rank holds a slice."""
        group = self.token_groups[tensor]
        return x if group is None else start_all_gather(x, group, async_op=False).wait()

    # --------------------------------------------------------------------------------------------------------- weight

    @property
    def master(self) -> Tensor:
        """The local part of the parameter, [out, in]; of a part of a packed projection, its rows."""
        return self.context.sharding.rows_of(self._stored)

    @property
    def weight(self) -> Tensor:
        """The local part in the compute dtype, [out, in]."""
        return self.master.to(self.dtype)

    def weight_operands(self) -> tuple[Any, Any]:
        """The weight as fprop's operand and as `dgrad_weight` takes it; kept for all micro-batches of a step."""
        context = self.context
        stamp = (context.step_state.weights_version, self.dtype, self.device)
        if context.weight_cache is None or context.weight_cache[0] != stamp:
            fprop, dgrad, keeps = self._weight_operands()
            if not keeps:
                return fprop, dgrad
            context.weight_cache = (stamp, fprop, dgrad)
        return context.weight_cache[1:]

    def _weight_operands(self) -> tuple[Any, Any, bool]:
        """Both results of `weight_operands`, and whether they can be kept for a step."""
        if self.weight_codes is not None:
            fprop, dgrad = self.backend.weight_of_codes(self.weight_codes, self.recipe[recipes.FPROP_WEIGHT])
            # Gathered codes themselves are kept where they are gathered, or freed there.
            return fprop, dgrad, fprop.tensors()[0] is not self.weight_codes.codes
        reuse = self.backend.transposes and same_weight_codes(self.recipe)
        as_codes = reuse and self.backend.packs(self.recipe[recipes.FPROP_WEIGHT]) and emulated.keeps_codes(self.device)
        if as_codes and self.dtype == torch.bfloat16 and self.segments is None:
            request, master = self.request(recipes.FPROP_WEIGHT), self.master
            # The codes are kept without padding; unpacking adds it.
            place, groups = self.place("weight"), self.padding.groups
            make_packed: MakeOperand = functools.partial(emulated.packed_weight, master, place, request, groups)
            if (watcher := self.context.watcher) is not None:
                padded = self.padding.pad_weight(master)
                make_packed = functools.partial(watcher.operand, make_packed, padded, place, request)
            fprop = make_packed()
            return fprop, fprop.transposed(), True
        in_backward = self._makes_dgrad_weight_in_backward
        from_fprop = reuse or self.recipe[recipes.DGRAD_WEIGHT].source != "tensor"
        slots = recipes.FPROP_WEIGHT, None if from_fprop else recipes.DGRAD_WEIGHT
        make_fprop, make_dgrad = self.operand_makers(self.padding.pad_weight(self.master), *slots, (in_backward, False))
        assert make_fprop is not None
        dgrad = fprop = make_fprop()
        if not in_backward:
            dgrad = (self.from_fprop_operand(fprop, recipes.DGRAD_WEIGHT) if make_dgrad is None else make_dgrad)()
        # An operand that is not quantized is the gathered copy, which is kept elsewhere, or a rounded master weight.
        rounded = self.rounding is not None and self.rounding.kept and self._stored.dtype != self.dtype
        copied = (fprop.quantized and dgrad.quantized) or (rounded and self.context.keeps_rounded)
        same = self._same_all_step(recipes.FPROP_WEIGHT) and (in_backward or self._same_all_step(recipes.DGRAD_WEIGHT))
        return fprop, dgrad, copied and same

    @property
    def _makes_dgrad_weight_in_backward(self) -> bool:
        """Whether every backward pass makes dgrad's weight from fprop's codes, because its draws or signs change."""
        return self.recipe[recipes.DGRAD_WEIGHT].source == "forward" and not self._same_all_step(recipes.DGRAD_WEIGHT)

    def dgrad_weight(self, operand: Any) -> Any:
        """dgrad's operand in the backward pass. operand: the second result of `weight_operands`."""
        return (
            self.from_fprop_operand(operand, recipes.DGRAD_WEIGHT)()
            if self._makes_dgrad_weight_in_backward
            else operand
        )

    def _same_all_step(self, slot: recipes.OperandSlot) -> bool:
        """Whether the weight's operand at `slot` is the same for every micro-batch of a step."""
        fresh_signs = self.recipe.gemms[slot.gemm].rht and self.recipe.rht_signs == "fresh"
        return not self.recipe[slot].drawn and not fresh_signs

    # ----------------------------------------------------------------------------------------------------- any tensor

    def operand_makers(
        self,
        x: Tensor,
        as_stored: recipes.OperandSlot | None,
        transposed: recipes.OperandSlot | None,
        keep: tuple[bool, bool] = (False, False),
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """Functions that make the recipe's operand `as_stored` from `x` and its operand `transposed` from x^T.

        x: all tokens, or this rank's slice of a tensor in `slices`. keep: whether each is kept for the backward pass.
        """
        slot = as_stored or transposed
        if slot is None:
            return None, None
        place, watcher = self.place(slot.tensor), self.context.watcher
        stored = None if as_stored is None else self.request(as_stored, keep[0])
        across = None if transposed is None else self.request(transposed, keep[1])
        make_stored, make_across = self.backend.operands(x, place, stored, across)
        if watcher is None:
            return make_stored, make_across
        return (
            make_stored and functools.partial(watcher.operand, make_stored, x, place, stored),
            make_across and functools.partial(watcher.operand, make_across, x.t(), place.t(), across),
        )

    def from_fprop_operand(self, operand: Any, slot: recipes.OperandSlot) -> MakeOperand:
        """A function that makes the operand at `slot` from the tensor's operand in fprop: it transposes the codes,
        or with the source `forward` quantizes their transposed `code * block scale` and multiplies tensor scales."""
        if self.recipe[slot].source != "forward":
            assert self.backend.transposes, f"operands of the backend {self.backend.name} cannot be transposed"
            return operand.transposed  # type: ignore[no-any-return]
        _, make = self.operand_makers(operand.unpacked().to(torch.bfloat16), None, slot)
        assert make is not None

        def make_scaled() -> Any:
            made, fprop_scale = make(), operand.scale
            if fprop_scale is None:
                return made
            return replace(made, scale=fprop_scale if made.scale is None else made.scale * fprop_scale)

        return make_scaled

    def place(self, tensor: str, all_tokens: bool = False) -> Place:
        """Where the padded part of a tensor that this rank quantizes lies: its slice of the tokens, or all."""
        tokens, group = ALL, None if all_tokens else self.slices.get(tensor)
        if group is not None:
            tokens = Span(group.rank() * (self.padding.tokens // group.size()), group)
        return self.context.place(tensor, tokens, self.padding.groups)

    def request(self, slot: recipes.OperandSlot, keep: bool = False) -> OperandRequest:
        """The request to the backend for `slot`. keep: whether the operand is kept for the backward pass."""
        rht, signs_key = self.recipe.gemms[slot.gemm].rht, None
        if rht and self.recipe.rht_signs == "fresh":
            signs_key = self.context.key(self.step, self.micro_batch, f"{slot.gemm}_signs")
        return OperandRequest(
            self.recipe[slot],
            rht,
            signs=self.recipe.rht_signs,
            key=self.rounding_key_of(slot),
            signs_key=signs_key,
            slot=slot,
            dtype=self.dtype,
            keep=keep or slot.tensor in self.slices,
        )

    def rounding_key_of(self, slot: recipes.OperandSlot) -> RoundingKey | None:
        """The key for an operand's draws; None: it has none."""
        return self.context.key(self.step, self.micro_batch, slot.name) if self.recipe[slot].drawn else None


class GroupedCall(LinearCall):
    """As `LinearCall`, of the linears of several experts: weight [experts, out, in], segments of x [tokens, in].

    Inside, the weight is [experts * out, in]. Operands of x and dy have the padding of their segments, which the
    backend adds; x, y and their gradients do not. Weights are kept as values: codes would be unpacked at every GEMM.
    """

    segments: Segments

    def __init__(self, context: LinearContext, weight: Tensor, x: Tensor, segments: Segments) -> None:
        super().__init__(context, weight, x)
        _, outputs, inputs = self._stored.shape
        self.backend = context.backend.of_experts(self.recipe, inputs, outputs)
        self.alignment = self.backend.alignment(self.recipe)
        self._stored, self.segments = self._stored.flatten(0, 1), self.backend.padded(segments, self.recipe)
        self.padding = Padding(segments.rows, segments.rows, 1, RowGroups(outputs, outputs))
        if self.backend.draws_ours:
            self.micro_batch = 0  # tokens are numbered over all micro-batches

    @functools.cached_property
    def experts(self) -> Segments:
        """The rows of the weight."""
        outputs, first = self.padding.groups.kept, self.context.sharding.outputs.at
        assert isinstance(first, int)
        segments = Segments.of_equal(outputs, len(self._stored) // outputs, self.device, first)
        return segments.padded_to(self.alignment.outputs)

    def all_tokens(self, x: Tensor, tensor: str) -> Tensor:
        """All rows of x or dy, in the order of the segments."""
        return self.segments.sort(x)

    def place(self, tensor: str, all_tokens: bool = False) -> Place:
        """As `LinearCall.place`. all_tokens: no rank has a slice."""
        if tensor == "weight":
            return Place(segments=self.experts)
        positions = self.segments.positions
        return Place(Span(0 if positions is None else positions), segments=self.segments)

    def lone(self, number: int, x: Tensor) -> LinearCall:
        """A lone linear's call with the codes and results of a segment, whose rows are `x`. Waits for the device."""
        expert, (_, rows) = number % self.segments.num_experts, self.segments.sizes[number]
        weight = self.master.unflatten(0, (len(self.experts.counts), -1))[expert]
        at = self.segments.padded_positions
        padded = slice(rows.start, rows.start + self.alignment.padded_tokens(len(x)))
        at = at + rows.start if isinstance(at, int) else at[padded]
        first, context = self.experts.first + expert * len(weight), replace(self.context, backend=self.backend)
        return _LoneCall(replace(context, weight_cache=None), weight, x, first, at)


class _LoneCall(LinearCall):
    """Of one segment of a `GroupedCall`. first: the first row of its weight. at: positions of its padded tokens."""

    def __init__(self, context: LinearContext, weight: Tensor, x: Tensor, first: int, at: int | Tensor) -> None:
        super().__init__(context, weight, x)
        self.micro_batch, self._first, self._at = 0, first, at

    def place(self, tensor: str, all_tokens: bool = False) -> Place:
        return Place(Span(self._first if tensor == "weight" else self._at))
