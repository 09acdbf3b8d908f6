"""The states of the random generators of one rank: Python, NumPy, torch on CPU and torch on its GPU.

Data order and stochastic rounding do not draw from these (they are functions of the seed and the step); they are
kept so that whatever else draws goes on as if there had been no interruption.
"""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def save_random_state(path: Path, device: torch.device) -> None:
    """Write this process's generator states to `path`, down to the disk. Raises OSError."""
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
    torch.save(state, buffer)  # not into the file: a full disk would be a RuntimeError then
    with open(path, "wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def restore_random_state(path: Path, device: torch.device) -> None:
    """Put this process's generators where `save_random_state` found them. A GPU's only if one was saved."""
    state = torch.load(path, weights_only=True)
    random.setstate(state["python"])
    position, has_gauss, gauss = state["numpy_rest"]
    np.random.set_state(("MT19937", state["numpy_key"].numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
