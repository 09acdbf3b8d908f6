"""Refuses linears whose input features are no multiple of what their recipe demands (precision/demands.py).

Tokens and output features never appear here: the linear layer pads them. Input features are what the user chose.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_fp4.config.schema import ConfigError
from megatron_fp4.precision import transformer_engine as te
from megatron_fp4.precision.demands import TILES, Demands, block_demands
from megatron_fp4.precision.plan import Plan, PlannedLinear
from megatron_fp4.precision.recipe import Recipe


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
    if backend == "transformer_engine" and (refusal := native_size_refusal(plan, tensor)):
        problem, remedy = refusal
        raise ConfigError(f"{problem} does not go with precision.backend=transformer_engine; {remedy}")


def native_size_refusal(plan: Plan, tensor: int) -> tuple[str, str] | None:
    """The first input of a linear that Transformer Engine's GEMMs cannot sum over, and the remedies, or None."""
    found = _misfit(plan, tensor, te.demands)
    if found is None:
        return None
    row, multiple = found
    problem = f"{_inputs(row, tensor)}, the input of {row.linear.title},"
    return problem, f"use a multiple of {multiple}, or backend=emulated"


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
        if TILES.get(operand.format) == multiple:
            return f"{row.key}.{place.gemm}.{place.tensor}.format={operand.format}"
    return f"{row.key}.fprop.rht={row.recipe.fprop.rht}"
