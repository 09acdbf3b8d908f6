import gzip
import json

import pytest
import torch

from assembly import check as validate
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import ConfigError
from megatron_fp4.training.profiling import ProfileWindow, memory_history
from tests.models.test_hybrid import CONFIGS

CPU = torch.device("cpu")


def run(folder, steps, window, active=True):
    with ProfileWindow(folder, window, CPU, active) as profile:
        for step in steps:
            with profile.step(step):
                torch.ones(step + 2, 3) @ torch.ones(3, 4)
    return sorted(path.name for path in folder.iterdir())


def test_a_window_is_written(tmp_path):
    assert run(tmp_path, range(6), [2, 4]) == ["profile_steps_2-4.json.gz", "profile_steps_2-4.txt"]
    assert "aten::mm" in (tmp_path / "profile_steps_2-4.txt").read_text()
    events = json.loads(gzip.decompress((tmp_path / "profile_steps_2-4.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 3


def test_a_window_is_cut_at_the_runs_ends(tmp_path):
    assert run(tmp_path, range(3), [2, 9]) == ["profile_steps_2-3.json.gz", "profile_steps_2-3.txt"]
    (resumed := tmp_path / "resumed").mkdir()
    assert "profile_steps_6-7.txt" in run(resumed, range(5, 9), [3, 7])


def test_off_by_default_on_other_ranks_and_behind_the_window(tmp_path):
    assert run(tmp_path, range(3), []) == run(tmp_path, range(3), [1, 2], active=False) == []
    assert run(tmp_path, range(5, 8), [1, 2]) == []
    with memory_history(tmp_path, active=False):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("window", ["[0,3]", "[3,2]", "[4]", "[1,9999]"])
def test_impossible_windows(window):
    with pytest.raises(ConfigError, match="is no window of this run's"):
        validate(compose_config([f"logging.profile_steps={window}"], CONFIGS), 1, "cpu")


def test_memory_history_needs_cuda():
    with pytest.raises(ConfigError, match="memory_history"):
        validate(compose_config(["logging.memory_history=true"], CONFIGS), 1, "cpu")
