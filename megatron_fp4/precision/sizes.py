"""Refuses linears whose input features are no multiple of what their recipe demands (precision/demands.py).

Tokens and output features never appear here: the linear layer pads them. Input features are what the user chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.demands import Demands, block_demands
from megatron_fp4.precision.plan import Plan, PlannedLinear
from megatron_fp4.precision.recipe import Recipe
from megatron_fp4.precision.refusals import Refusal
from megatron_fp4.quantization.formats import format_of


def check_sizes(plan: Plan, tensor: int, backend: str) -> None:
    """Raise ConfigError unless every quantized linear of `plan` has input features that blocks and transforms divide.

    tensor: ranks that share the input features of some linears. backend: as `precision.backend` has it.
    """
    if found := _misfit(plan, tensor, block_demands):
        row, multiple = found
        size, shards = row.linear.in_features, tensor if row.linear.input_sharded else 1
        below = size // (shards * multiple) * shards * multiple
        working = f"{below} or {below + shards * multiple}" if below else str(shards * multiple)
        fewer = [str(n) for n in range(1, shards) if shards % n == 0 and size % (n * multiple) == 0]
        ranks = f", or parallel.tensor={' or '.join(fewer)}" if fewer else ""
        raise ConfigError(
            f"{_inputs(row, tensor)} is the input of {row.linear.title} and not a multiple of {multiple}, as "
            f"{_what_demands(row, multiple)} needs; {working} work{ranks}, or choose another format"
        )
    if split := _split_tile(plan, tensor):
        row = split
        multiple, size = block_demands(row.recipe).group_outputs, row.linear.out_features
        fewer = [str(n) for n in range(1, tensor) if tensor % n == 0 and size % (n * multiple) == 0]
        ranks = f", or parallel.tensor={' or '.join(fewer)}" if fewer else ""
        raise ConfigError(
            f"{size} output features of {row.linear.title} / parallel.tensor={tensor} are not a multiple of "
            f"{multiple}, as {row.key}.dgrad.rht={row.recipe.dgrad.rht} needs, which mixes as many; use a multiple of "
            f"{tensor * multiple}{ranks}, or a smaller transform"
        )
    if refusal := size_refusal([plan], tensor, backend):
        raise ConfigError(f"{refusal.problem} does not go with precision.backend={backend}; {refusal.remedy}")


def size_refusal(plans: Iterable[Plan | None], tensor: int, backend: str) -> Refusal | None:
    """The first input of a linear that the backend's GEMMs cannot sum over although blocks divide it, or None."""
    for plan in plans:
        if backend == "transformer_engine" and plan is not None and (found := _misfit(plan, tensor, te.demands)):
            row, multiple = found
            problem = f"{_inputs(row, tensor)}, the input of {row.linear.title},"
            return Refusal(problem, f"use a multiple of {multiple}, or precision.backend=emulated")
    return None


def _split_tile(plan: Plan, tensor: int) -> PlannedLinear | None:
    """The first quantized linear whose output features ranks share so that one transform would mix those of two.

    Groups (KV heads, state groups) are padded one by one and never lie on two ranks.
    """
    for row in plan.rows:
        multiple, outputs = block_demands(row.recipe).group_outputs, row.linear.out_features
        shared = tensor > 1 and not row.linear.input_sharded and row.linear.groups == 1
        if row.recipe.dgrad.rht and shared and outputs % (tensor * multiple):
            return row
    return None


def _misfit(plan: Plan, tensor: int, demands: Callable[[Recipe], Demands]) -> tuple[PlannedLinear, int] | None:
    """The first quantized linear whose input features on a rank are not a multiple of what is demanded, and that."""
    for row in plan.rows:
        multiple, shards = demands(row.recipe).inputs, tensor if row.linear.input_sharded else 1
        if row.recipe.quantized and row.linear.in_features % (shards * multiple):
            return row, multiple
    return None


def _inputs(row: PlannedLinear, tensor: int) -> str:
    each = f" / parallel.tensor={tensor}" if row.linear.input_sharded and tensor > 1 else ""
    return f"{row.linear.input_key}={row.linear.in_features}{each}"


def _what_demands(row: PlannedLinear, multiple: int) -> str:
    """The key of the first operand or transform that wants input features to be a multiple of `multiple`."""
    for place, operand in row.recipe.operands.items():
        if operand.quantized and format_of(operand.format).tile == multiple:
            return f"{row.key}.{place.key}.format={operand.format}"
    return f"{row.key}.fprop.rht={row.recipe.fprop.rht}"
