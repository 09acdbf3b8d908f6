"""Decodes NVFP4 by its definition, with tables written out and none of the project's code."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(byte: int) -> float:
    """OCP FP8 E4M3: 4 bits of exponent with bias 7, 3 of mantissa, no infinity."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 0xF, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def block_values(codes: Tensor, scales: Tensor) -> Tensor:
    """FP32 `code * block scale` [out, in]. Exact, since a product has six significant bits. codes: uint8 [out, in / 2],
    low nibble first. scales: E4M3 [out, in / 16]."""
    packed, stored = codes.numpy(), scales.view(torch.uint8).numpy()
    nibbles = np.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)
    values = np.array(E2M1 + [-value for value in E2M1])[nibbles]
    block = np.array([e4m3(byte) for byte in range(256)])[stored]
    return torch.from_numpy((values * block.repeat(16, axis=1)).astype(np.float32))
