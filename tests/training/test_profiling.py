"""The profiler over a window of steps."""

import gzip
import json
from types import SimpleNamespace

import torch

from megatron_fp4.training.callbacks.profiling import Profile
from megatron_fp4.training.trainer import Step


def run(folder, steps, window, rank=0):
    config = SimpleNamespace(run=SimpleNamespace(dir=str(folder)), logging=SimpleNamespace(profile_steps=window))
    trainer = SimpleNamespace(config=config, mesh=SimpleNamespace(rank=rank, device=torch.device("cpu")))
    profile = Profile()
    profile.trainer = trainer
    profile.start(0)
    for step in steps:
        with profile.around_step(Step(step, [], 0.0)):
            torch.ones(step + 2, 3) @ torch.ones(3, 4)
    profile.close()
    return sorted(path.name for path in folder.iterdir())


def test_a_window_is_profiled_on_the_first_rank_and_ends_with_the_run(tmp_path):
    assert run(tmp_path, range(3), [1, 2], rank=1) == run(tmp_path, range(5, 8), [1, 2]) == []
    assert run(tmp_path, range(6), [2, 4]) == ["profile_steps_2-4.json.gz", "profile_steps_2-4.txt"]
    assert "aten::mm" in (tmp_path / "profile_steps_2-4.txt").read_text()
    events = json.loads(gzip.decompress((tmp_path / "profile_steps_2-4.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 3
    (resumed := tmp_path / "resumed").mkdir()
    assert run(resumed, range(5, 9), [3, 11]) == ["profile_steps_6-9.json.gz", "profile_steps_6-9.txt"]
