"""One call of one linear: how each tensor becomes operands by the recipe.

Every operand is laid out with its dot product along the last dimension and quantized there. x and dy are quantized
twice, once per GEMM that uses them, each time with its own tensor scale and (where rounding is stochastic) its own
draws; 16x16-scaled weights once, since their transposed codes are those of the transposed weight.

Tokens are padded with zeros to what the kernels demand (precision/demands.py), and so are output features, which come
in `num_groups` equal groups (the heads of a packed projection): each group is padded by itself, so that block
boundaries depend on the model alone, not on how many ranks share the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_fp4.precision.backend import (
    BackendOperand,
    MakeOperand,
    OperandRequest,
    RowGroups,
    requantized_by,
)
from megatron_fp4.precision.emulated import EmulatedBackend, transform_signs
from megatron_fp4.precision.fp32_gradients import gradient_spec, local_part, rounding_of
from megatron_fp4.precision.linear_context import LinearContext, same_weight_codes
from megatron_fp4.precision.packed_weight import codes_of
from megatron_fp4.precision.recipe import (
    DGRAD_WEIGHT,
    FPROP_ACTIVATION,
    FPROP_WEIGHT,
    USES,
    WGRAD_ACTIVATION,
    Place,
)
from megatron_fp4.precision.token_messages import start_all_gather
from megatron_fp4.quantization.elements import E2M1_MAX
from megatron_fp4.quantization.formats import format_of
from megatron_fp4.quantization.rounding import RoundingKey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LinearCall:
    """One forward pass of one linear: its place in the run, and the quantization of each tensor by the recipe.

    weight: parameter [out, in]. x: [tokens, in], this rank's slice of them with `in_tokens`; shape, dtype and device
    are read here. num_tokens: of all slices. slices: of the tensors whose slices are quantized before they are gathered
    (`activation`, `gradient`), the ranks that hold the others.
    """

    def __init__(self, context: LinearContext, weight: Tensor, x: Tensor) -> None:
        self.context, self.recipe, self.backend = context, context.recipe, context.backend
        self.step, self.micro_batch = context.clock.step, context.clock.micro_batch
        self.device, self.dtype = x.device, x.dtype
        self.master, self.gradient_spec = local_part(weight), gradient_spec(weight)
        self.rounding = rounding_of(weight)
        self.gathered = codes_of(weight)  # then the master is without values
        self.group_rows = self.master.shape[0] // context.num_groups
        demands = self.backend.demands(self.recipe)
        self.num_tokens = x.shape[0] * (1 if context.in_tokens is None else context.in_tokens.size())
        self.padded_tokens = demands.padded_tokens(self.num_tokens)
        self.padded_group_rows = demands.padded_group(self.group_rows, context.num_groups)
        self.out_offset = context.out_group_offset * self.padded_group_rows
        self.slices: dict[str, ProcessGroup] = {}
        for tensor, group in (("activation", context.in_tokens), ("gradient", context.out_tokens)):
            if group is None or not self._sends_operands(tensor):
                continue
            # Whole blocks and tiles; padding then is none.
            if self.num_tokens % (group.size() * demands.tokens) == 0:
                self.slices[tensor] = group

    @property
    def weight(self) -> Tensor:
        """[out, in], the local part in the compute dtype."""
        return self.master.to(self.dtype)

    # ------------------------------------------------------------------------------------------------------- operands

    def prepare(
        self,
        columns: Place | None,
        rows: Place | None,
        x: Tensor,
        *,
        keep_columns: bool = False,
        keep_rows: bool = False,
    ) -> tuple[MakeOperand | None, MakeOperand | None]:
        """What makes the operand `columns` of the recipe from `x`, and the operand `rows` from its transpose.

        x: all tokens, or this rank's slice of a tensor in `slices`, of which the slice's operands are made, to be sent.
        keep_columns, keep_rows: the first, the second is for the backward pass. x may be FP32 where the compute dtype
        is BF16, and counts as rounded then (weights).
        """
        place = columns or rows
        tensor = "" if place is None else place.tensor
        sliced = tensor in self.slices
        return self.backend.operands(
            x,
            None if columns is None else self.request(columns),
            None if rows is None else self.request(rows),
            dtype=self.dtype,
            keep_columns=keep_columns or sliced,
            keep_rows=keep_rows or sliced,
            amax_group=self.slices.get(tensor) or self.context.amax_group(tensor),
        )

    def wgrad_activation(self, x: Tensor) -> MakeOperand:
        """What makes x [tokens, in], padded, wgrad's operand in the backward pass."""
        reuse, again = self._reuses("activation"), self.requantizes("activation")
        of_fprop = reuse or again
        make, make_rows = self.prepare(
            FPROP_ACTIVATION if of_fprop else None, None if of_fprop else WGRAD_ACTIVATION, x
        )
        if of_fprop:
            assert make is not None
            return self.requantized(make(), WGRAD_ACTIVATION) if again else lambda: self.transposed(make())
        assert make_rows is not None
        return make_rows

    def wgrad_operand(self, tensors: Sequence[Tensor | None], layout: Any) -> BackendOperand:
        """wgrad's operand of what the forward pass saved of x: it itself, or fprop's to be quantized again."""
        operand = self.backend.operand_from_saved(tensors, layout)
        return self.requantized(operand, WGRAD_ACTIVATION)() if self.requantizes("activation") else operand

    def requantizes(self, tensor: str) -> bool:
        """Whether the tensor's operand in the backward pass is made of fprop's codes."""
        return self.recipe[USES[tensor][1]].source == "forward"

    def requantized(self, operand: BackendOperand, place: Place) -> MakeOperand:
        """What makes the operand at `place` of what fprop's operand of the same tensor stands for."""
        return requantized_by(
            self.backend,
            operand,
            self.request(place),
            dtype=self.dtype,
            keep=place.tensor in self.slices,
            amax_group=self.slices.get(place.tensor) or self.context.amax_group(place.tensor),
        )

    def send(self, make: MakeOperand | None, place: Place, beside: bool = True) -> MakeOperand | None:
        """What gives the operand of all tokens.

        Of a tensor in `slices`, `make` makes that of this rank's slice: it is made now, and on its way to the other
        ranks until what is returned waits for theirs. Of other tensors nothing happens now. beside: whether anything
        runs meanwhile.
        """
        if make is None or place.tensor not in self.slices:
            return make
        gather = functools.partial(start_all_gather, group=self.slices[place.tensor], beside=beside)
        made: MakeOperand = self.backend.gathered(make(), gather, transposed=place.transposed)
        return made

    def gathered_unless_sliced(self, x: Tensor, tensor: str) -> Tensor:
        """What `prepare` takes of a tensor [tokens, features] that ranks may hold in slices."""
        return x if tensor in self.slices else self.whole(x, tensor)

    def whole(self, x: Tensor, tensor: str) -> Tensor:
        """All tokens of x (`activation`) or dy (`gradient`), of which this rank may hold a slice."""
        group = self.context.in_tokens if tensor == "activation" else self.context.out_tokens
        return x if group is None else start_all_gather(x, group, beside=False).wait()

    def _sends_operands(self, tensor: str) -> bool:
        """Whether a tensor's operands are gathered, and not itself. dy's are both needed at once: only codes of four
        bits are fewer bytes than dy, once. One of x waits for the backward pass, as a slice."""
        if self._reuses(tensor) or not self.backend.joins(self.recipe):
            return False
        operands = [self.recipe[place] for place in USES[tensor]]
        if tensor == "activation":
            return True
        # Along its columns MS-EDEN's kernel makes values, not codes.
        codes = all(operand.quantized and format_of(operand.format).largest == E2M1_MAX for operand in operands)
        return codes and operands[0].rounding != "ms_eden"

    def _reuses(self, tensor: str) -> bool:
        return tensor == "activation" and self.recipe[WGRAD_ACTIVATION].reuse_fprop

    def request(self, place: Place) -> OperandRequest:
        """What the backend is asked to make for `place`."""
        operand, rht = self.recipe[place], self.recipe.gemms[place.gemm].rht
        signs_key = self._signs_key(place.gemm) if rht else None
        group, first_token = self.slices.get(place.tensor), 0
        if group is not None:
            first_token = group.rank() * (self.num_tokens // group.size())
        key = self.draws(place, first_token)
        return OperandRequest(operand, rht, self.recipe.rht_signs, key, signs_key, place)

    def draws(self, place: Place, first_token: int = 0) -> RoundingKey | None:
        """The key of an operand's draws, of x or dy from `first_token` on; None where it is rounded to nearest."""
        if not self.recipe[place].drawn:
            return None
        rows = self.out_offset if place.tensor == "weight" else first_token
        columns = self.out_offset if place.tensor == "gradient" else self.context.in_offset
        rows, columns = (columns, rows) if place.transposed else (rows, columns)
        return self.context.key(self.step, self.micro_batch, place.name, rows, columns)

    def signs(self, gemm: str) -> Tensor:
        """FP32 [size of the Hadamard transform], of +-1."""
        return transform_signs(self.recipe.gemms[gemm].rht, self.recipe.rht_signs, self._signs_key(gemm), self.device)

    def _signs_key(self, gemm: str) -> RoundingKey | None:
        if self.recipe.rht_signs != "fresh":
            return None
        return self.context.key(self.step, self.micro_batch, f"{gemm}_signs", 0, 0)

    def transposed(self, operand: BackendOperand) -> BackendOperand:
        """The same codes with rows and columns exchanged, for another GEMM."""
        assert self.backend.transposed is not None, f"the backend {self.backend.name} cannot use codes twice"
        made: BackendOperand = self.backend.transposed(operand)
        return made

    # --------------------------------------------------------------------------------------------------------- weight

    @property
    def requantizes_late(self) -> bool:
        """Whether dgrad's weight is made of fprop's codes anew in every micro-batch: then in the backward pass."""
        return self.requantizes("weight") and not self._lasts(DGRAD_WEIGHT)

    def dgrad_weight(self, operand: BackendOperand) -> BackendOperand:
        """dgrad's operand in the backward pass: the second of `weight_operands`, or what is made of it now."""
        return self.requantized(operand, DGRAD_WEIGHT)() if self.requantizes_late else operand

    def weight_operands(self) -> tuple[BackendOperand, BackendOperand]:
        """The weight as fprop's operand and what `dgrad_weight` takes, kept for all micro-batches of a step."""
        context, recipe = self.context, self.recipe
        stamp = (context.clock.weights_version, self.dtype, self.device)
        if context.weight_cache is not None and context.weight_cache[0] == stamp:
            return context.weight_cache[1:]
        if self.gathered is not None:
            assert isinstance(self.backend, EmulatedBackend)
            gathered = self.backend.gathered_weight(self.gathered)
            operands = gathered, gathered.transposed()
            if isinstance(gathered.values, Tensor):  # codes stay where FSDP has them, and are freed there
                context.weight_cache = (stamp, *operands)
            return operands
        once = recipe[DGRAD_WEIGHT].reuse_fprop or self.same_weight_codes
        shared = once and self.backend.transposed is not None
        if shared and self.same_weight_codes and (packed := self._packed_weight()) is not None:
            context.weight_cache = (stamp, packed, self.transposed(packed))
            return context.weight_cache[1:]
        again, late = self.requantizes("weight"), self.requantizes_late
        alone = shared or again
        make_fprop, make_dgrad = self.prepare(
            FPROP_WEIGHT, None if alone else DGRAD_WEIGHT, self.pad_rows(self.master), keep_columns=late
        )
        assert make_fprop is not None
        fprop = make_fprop()
        if again:
            make_dgrad = None if late else self.requantized(fprop, DGRAD_WEIGHT)
            dgrad = fprop if make_dgrad is None else make_dgrad()
        else:
            dgrad = self.transposed(fprop) if make_dgrad is None else make_dgrad()
        # What is not quantized is FSDP's gathered copy itself, which must not outlive its use; or a master, rounded.
        own = self.rounding is not None and self.rounding.kept and self.master.dtype != self.dtype
        own = own and context.keeps_rounded
        if ((fprop.quantized and dgrad.quantized) or own) and self._weight_codes_last():
            context.weight_cache = (stamp, fprop, dgrad)
        return fprop, dgrad

    def fprop_weight(self) -> BackendOperand:
        """fprop's operand of the weight by itself, padded, for whoever wants its values."""
        make, _ = self.prepare(FPROP_WEIGHT, None, self.pad_rows(self.master))
        assert make is not None
        return make()

    def _packed_weight(self) -> BackendOperand | None:
        """fprop's operand as codes, where the backend keeps those; padding comes in when they are unpacked."""
        if self.dtype != torch.bfloat16:
            return None
        packed: BackendOperand | None = self.backend.packed_weight(
            self.master,
            self.request(FPROP_WEIGHT),
            rows=(self.group_rows, self.padded_group_rows),
            amax_group=self.context.amax_group("weight"),
        )
        return packed

    @property
    def same_weight_codes(self) -> bool:
        """See `same_weight_codes`."""
        return same_weight_codes(self.recipe)

    def _weight_codes_last(self) -> bool:
        """Whether the weight's operands as `weight_operands` has them are the same for every micro-batch of a step."""
        return self._lasts(FPROP_WEIGHT) and (self.requantizes_late or self._lasts(DGRAD_WEIGHT))

    def _lasts(self, place: Place) -> bool:
        fresh = self.recipe.gemms[place.gemm].rht and self.recipe.rht_signs == "fresh"
        return not self.recipe[place].drawn and not fresh

    def running_gradient(self, weight: Tensor) -> Tensor | None:
        """The gradient of earlier micro-batches if wgrad's GEMM can add to it itself: FP32 [out, in], local."""
        if not self.backend.accumulates or not weight.is_leaf or weight.grad is None:
            return None
        total = local_part(weight.grad)
        return total if total.dtype == torch.float32 and total.is_contiguous() else None

    def weight_gradient(self, dy: BackendOperand, x: BackendOperand, total: Tensor | None) -> Tensor:
        """dy^T x of wgrad's operands, FP32 [out, in] without padding; added to `total` where there is one."""
        padded, kept = self.padded_group_rows, self.group_rows
        rows = None if padded == kept else RowGroups(padded, kept)
        product: Tensor = self.backend.gemm(dy, x, torch.float32, total, rows)
        return product

    # -------------------------------------------------------------------------------------------------------- padding

    def pad(self, y: Tensor) -> Tensor:
        """[tokens, out] with tokens and, unless they are, each group of output features padded."""
        is_padded = y.shape[-1] == self.context.num_groups * self.padded_group_rows
        return self.pad_tokens(y if is_padded else self._pad_groups(y))

    def result(self, y: Tensor) -> Tensor:
        """What the caller gets of a padded y: no padded tokens, and no padded features unless it keeps them."""
        y = self.unpad_tokens(y)
        return y if self.context.keep_padding else self._unpad_groups(y)

    def seen(self, y: Tensor) -> Tensor:
        """[tokens, out] of what the caller gets or gives back."""
        return self._unpad_groups(y) if y.shape[-1] != self.context.num_groups * self.group_rows else y

    def pad_tokens(self, x: Tensor) -> Tensor:
        """[tokens, features] with tokens padded."""
        extra = self.padded_tokens - self.num_tokens
        return torch.nn.functional.pad(x, (0, 0, 0, extra)) if extra else x

    def unpad_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `pad_tokens`."""
        return x[: self.num_tokens] if self.padded_tokens != self.num_tokens else x

    def pad_rows(self, w: Tensor) -> Tensor:
        """[out, in] with each group of output features padded."""
        return self._pad_groups(w.t()).t() if self.padded_group_rows != self.group_rows else w

    def unpad_rows(self, w: Tensor) -> Tensor:
        """The inverse of `pad_rows`."""
        return RowGroups(self.padded_group_rows, self.group_rows).of(w)

    def _pad_groups(self, y: Tensor) -> Tensor:
        extra = self.padded_group_rows - self.group_rows
        if extra == 0:
            return y
        return torch.nn.functional.pad(y.unflatten(-1, (-1, self.group_rows)), (0, extra)).flatten(-2)

    def _unpad_groups(self, y: Tensor) -> Tensor:
        if self.padded_group_rows == self.group_rows:
            return y
        return y.unflatten(-1, (-1, self.padded_group_rows))[..., : self.group_rows].flatten(-2)
