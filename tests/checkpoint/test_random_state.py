import random
from pathlib import Path

import numpy as np
import torch

from megatron_fp4.checkpoint.random_state import restore_random_state, save_random_state

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.normal()),
        torch.rand(()).item(),
    ]


def test_draws_go_on_where_they_were(tmp_path: Path) -> None:
    draw()  # leaves half a normal pair behind, in Python and in NumPy
    save_random_state(tmp_path / "rng", CPU)
    expected = [draw() for _ in range(3)]
    restore_random_state(tmp_path / "rng", CPU)
    assert [draw() for _ in range(3)] == expected
