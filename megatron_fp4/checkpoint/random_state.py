"""The states of the random generators of one rank: Python, NumPy, torch on CPU and torch on its GPU.

Data order and stochastic rounding do not draw from these (they are functions of the seed and the step); they are
kept so that whatever else draws goes on as if there had been no interruption.
"""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def capture_random_state(device: torch.device) -> bytes:
    """This process's generator states."""
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))  # type: ignore[arg-type]
    # Tensors and plain types only, so that loading never runs code from the file.
    state = {
        "python": random.getstate(),
        "numpy_key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_rest": (int(numpy_state["state"]["pos"]), int(numpy_state["has_gauss"]), float(numpy_state["gauss"])),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def restore_random_state(content: bytes, device: torch.device) -> None:
    """Put this process's generators where `capture_random_state` found them. A GPU's only if one was saved."""
    state = torch.load(io.BytesIO(content), weights_only=True)
    random.setstate(state["python"])
    position, has_gauss, gauss = state["numpy_rest"]
    np.random.set_state(("MT19937", state["numpy_key"].numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def pack(states: Sequence[bytes]) -> bytes:
    """The states of all ranks as one file."""
    buffer = io.BytesIO()
    torch.save([torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states], buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> list[bytes]:
    """The inverse of `pack`."""
    return [state.numpy().tobytes() for state in torch.load(io.BytesIO(content), weights_only=True)]
