"""scripts/slurm on a real Slurm of two nodes, where one can be started; tests/slurm_cluster.py does it by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import slurm_cluster

MISSING = slurm_cluster.missing()


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} here: apt-get install slurm-wlm munge")
def test_a_job_is_stopped_preempted_refused_and_cancelled(tmp_path: Path) -> None:
    """With the process tracking whose signals reach every process of a job."""
    assert slurm_cluster.try_out(tmp_path, ["linuxproc"]) == []


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_cluster, "DAEMONS", ("sh", "no-such-daemon"))
    assert slurm_cluster.missing() == ["no-such-daemon"]


def test_ports_are_free_and_in_a_row() -> None:
    first, second, third = slurm_cluster.three_ports()
    assert 1024 < first == second - 1 == third - 2 < 65536
