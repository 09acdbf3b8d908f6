"""What a linear does about means (means.py) on the device at hand, for the self-test: against the reference and FP64.

    means      of every tensor that is split: means and what is left without them, bit for bit
    products   what means add to fprop, dgrad and wgrad, against FP64

The four-bit operands of what is left are compared like all others, whatever was subtracted; that it was the mean, and
that what it takes from the products comes back, only this sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_fp4.precision.backend import BackendOperand, RowGroups
from megatron_fp4.precision.comparison import product_errors, product_rows
from megatron_fp4.precision.gemm_operand import GemmOperand
from megatron_fp4.precision.linear_call import LinearCall
from megatron_fp4.precision.means import add_means, add_products_of_means, adds_means, split
from megatron_fp4.precision.recipe import PLACES, Place
from megatron_fp4.quantization.group_means import group_means, group_sums, without_means
from megatron_fp4.quantization.hadamard import random_hadamard_transform


def mean_faults(
    call: LinearCall, tensors: Mapping[str, Tensor], made: Mapping[Place, BackendOperand]
) -> Iterator[tuple[str, str, float | None]]:
    """Every comparison: what was compared, what differs (empty: nothing), and of products the relative error.

    tensors: x [tokens, in] and dy [tokens, out] as `activation` and `gradient`, padded. made: all operands of the call.
    """
    size, means = call.recipe.mean_group, {}
    for tensor in ("activation", "gradient"):
        found, rest = split(call, tensor, tensors[tensor])
        if found is None:
            continue
        x = tensors[tensor][: call.num_tokens]
        means[tensor] = group_means(x, size)
        fault = "" if torch.equal(found, means[tensor]) else "are not the reference's"
        yield f"means of the {tensor}", fault, None
        if rest is not None:
            expected = call.pad_tokens(without_means(x, means[tensor], size))
            fault = "" if torch.equal(rest, expected) else "is not the reference's"
            yield f"{tensor} without its means", fault, None
    for place in PLACES:
        if place.side == "left" and place.gemm != "wgrad" and call.recipe[place].removes_mean:
            weight = made[next(other for other in PLACES if other.gemm == place.gemm and other.side == "right")]
            product = means[place.tensor].new_zeros(call.padded_tokens, weight.unpacked().shape[0])
            add_means(call, place, product, means[place.tensor], weight)
            rows, rht = means[place.tensor], call.recipe.gemms[place.gemm].rht
            if rht:
                rows = random_hadamard_transform(rows.to(torch.bfloat16), rht, call.signs(place.gemm))
            chosen = product_rows(product[: call.num_tokens])
            errors = product_errors(product, GemmOperand(rows), weight, chosen, left_rows=chosen // size)
            yield f"{place.gemm} product of means", errors.fault, errors.total
    if adds_means(call.recipe):
        x_means, sums = means["activation"], group_sums(means["gradient"], call.num_tokens, size)
        outputs = call.master.shape[0]
        gradient = torch.zeros(outputs, x_means.shape[1], device=x_means.device)
        add_products_of_means(call, gradient, means["gradient"], x_means)
        chosen = product_rows(gradient)
        of_left = RowGroups(call.padded_group_rows, call.group_rows).padded_indices(chosen)
        left, right = GemmOperand(sums.t()), GemmOperand(x_means.t())
        errors = product_errors(gradient, left, right, chosen, left_rows=of_left)
        yield "wgrad product of means", errors.fault, errors.total
