"""What a profile of a step adds up, and that it is refused without a GPU."""

from __future__ import annotations

import pytest
import torch

from scripts.profile_step import Kernel, late, length, main, table, union


def test_overlapping_intervals_count_once():
    assert union([(5, 7), (0, 2), (1, 3), (7, 8)]) == [(0, 3), (5, 8)]
    assert length([(0, 10), (2, 5), (20, 21)]) == 11


def test_what_runs_beside_others_is_hidden_and_what_nothing_fills_is_idle():
    kernels = [
        Kernel("nvjet_sm90_tst", 0, 6_000_000),
        Kernel("ncclDevKernel_AllGather", 4_000_000, 8_000_000),
        Kernel("quantize_rows_kernel", 9_000_000, 10_000_000),
    ]
    lines = {line.split()[0]: line.split()[1:] for line in table(kernels, 0.012)[1:]}
    assert lines["GEMMs"] == ["6.0", "50.0%", "1", "2.0"]
    assert lines["messages"] == ["4.0", "33.3%", "1", "2.0"]
    assert lines["quantizers"] == ["1.0", "8.3%", "1", "0.0"]
    assert lines["idle"] == ["3.0", "25.0%"]


def test_a_gap_is_the_hosts_only_as_far_as_it_asked_late():
    first = Kernel("a", 0, 10, asked=0)
    assert late([first, Kernel("b", 30, 40, asked=5)]) == 0  # it was asked for in time and waited for something else
    assert late([first, Kernel("b", 30, 40, asked=25)]) == 15
    assert late([first, Kernel("b", 30, 40)]) == 0
    assert late([]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["model=tiny"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
