"""Tensors that are hard for the formats, and what compares quantized tensors with those of the oracle."""

import numpy as np
import torch

from megatron_fp4.quantization.rounding import unpack_codes


def tensors(rows: int, columns: int, seed: int = 0) -> dict[str, np.ndarray]:
    """From names to FP32 [rows, columns]."""
    rng = np.random.default_rng(seed)
    gauss = rng.standard_normal((rows, columns))
    spikes = gauss * 0.01
    spikes[rng.integers(rows), rng.integers(columns)] = 1e4
    zero_blocks = gauss.copy()
    zero_blocks[: rows // 2, : columns // 2] = 0
    halfway = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5], gauss.shape)
    halfway[:, ::16] = 6
    named = {
        "gauss": gauss,
        "bf16": torch.from_numpy(gauss).bfloat16().double().numpy(),
        "student_t": rng.standard_t(2, (rows, columns)),
        "wide": np.exp(6 * gauss) * np.sign(rng.standard_normal((rows, columns))),
        "subnormal": gauss * 1e-40,
        "nearly_subnormal": gauss * 2e-36,
        "huge": np.clip(gauss * 1.1e38, -3.4028234e38, 3.4028234e38),
        "integer": rng.integers(-8, 9, (rows, columns)),
        "sparse": gauss * (rng.random((rows, columns)) < 0.04),
        "zero_blocks": zero_blocks,
        "spike": spikes,
        "halfway": halfway,
        "negative_zero": np.full((rows, columns), -0.0),
    }
    return {name: np.ascontiguousarray(values.astype(np.float32)) for name, values in named.items()}


NAMES = list(tensors(32, 32))


def codes_of(quantized) -> np.ndarray:
    """Unpacked E2M1 codes [rows, cols]."""
    codes = unpack_codes(quantized.codes)
    return codes.reshape(-1, codes.shape[-1]).numpy()


def scales_of(quantized) -> np.ndarray:
    """Block scales in FP64 [rows, blocks]."""
    scales = quantized.scales.double()
    return scales.reshape(-1, scales.shape[-1]).numpy()


def close_in_fp32(actual: torch.Tensor, expected: np.ndarray) -> bool:
    """Whether FP32 `actual` is `expected` up to three roundings."""
    with np.errstate(over="ignore", invalid="ignore"):
        expected = expected.astype(np.float32).reshape(actual.shape).astype(np.float64)
        tolerance = 3 * np.maximum(np.abs(expected) * 2.0**-23, 2.0**-149)
        difference = np.abs(np.where(np.isfinite(expected), actual.double().numpy() - expected, 0))
    overflows_alike = np.array_equal(np.isinf(expected), np.isinf(actual.numpy()))
    return overflows_alike and bool((difference <= tolerance).all())
