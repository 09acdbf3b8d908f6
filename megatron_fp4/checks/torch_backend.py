"""Refuses recipes that the backend `torch` (precision/torch_scaled_mm.py) cannot compute on any chip."""

from __future__ import annotations

from megatron_fp4.config.schema import ConfigError, PrecisionConfig
from megatron_fp4.precision.recipe import GEMMS
from megatron_fp4.precision.torch_scaled_mm import FORMATS


def validate_torch_backend(precision: PrecisionConfig, device_type: str, key: str) -> None:
    """Raise ConfigError if `precision` names this backend and it cannot compute the recipe, or not on `device_type`."""
    if precision.backend != "torch":
        return
    if refusal := torch_refusal(precision, key):
        problem, remedy = refusal
        raise ConfigError(f"{problem} does not go with {key}.backend=torch; {remedy}")
    if device_type != "cuda":
        raise ConfigError(
            f"{key}.backend=torch multiplies on Blackwell's tensor cores and this run is on {device_type}; use "
            f"{key}.backend=emulated, which has the same codes"
        )


def torch_refusal(precision: PrecisionConfig, key: str) -> tuple[str, str] | None:
    """The first thing in a precision config that `scaled_mm` cannot multiply, and the remedies, or None."""
    emulated = "or backend=emulated"
    if precision.compute_dtype != "bfloat16":
        return f"{key}.compute_dtype={precision.compute_dtype}", f"use bfloat16, {emulated}"
    for gemm, names in GEMMS.items():
        operands = {name: getattr(getattr(precision, gemm), name) for name in names}
        for name, operand in operands.items():
            where = f"{key}.{gemm}.{name}"
            if operand.format not in ("bf16", *FORMATS):
                remedy = f"it multiplies {' and '.join(FORMATS)}; use one of them or bf16, {emulated}"
                return f"{where}.format={operand.format}", remedy
            if operand.reuse_fprop:
                along = "tensor cores want scales along the dot product"
                return f"{where}.reuse_fprop=true", f"{along}; set it to false, {emulated}"
        (first_name, first), (second_name, second) = operands.items()
        if first.format != second.format:
            both = f"{key}.{gemm}.{first_name}.format={first.format} and {second_name}.format={second.format}"
            return f"{both} in one GEMM", f"make them equal, {emulated}"
    return None
