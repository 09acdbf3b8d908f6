import random

import numpy as np
import torch

from megatron_fp4.checkpoint.random_state import capture_random_state, pack, restore_random_state, unpack

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.normal()),
        torch.rand(()).item(),
    ]


def test_draws_go_on_where_they_were() -> None:
    draw()  # leaves half a normal pair behind, in Python and in NumPy
    saved = capture_random_state(CPU)
    expected = [draw() for _ in range(3)]
    restore_random_state(unpack(pack([b"another rank's", saved]))[1], CPU)
    assert [draw() for _ in range(3)] == expected
