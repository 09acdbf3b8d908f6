from __future__ import annotations

import os
import signal

import pytest

from megatron_fp4.faults.signals import StopRequest
from megatron_fp4.precision.clock import RunClock
from megatron_fp4.training.step import StepRequests, train_step
from tests.training.harness import launch, toy, toy_batches, toy_mesh


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_sets_a_flag_and_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested and stop.received == number
    assert signal.getsignal(number) is before


def test_second_interrupt_interrupts() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def _stop_one(rank: int) -> tuple[int, bool, bool]:
    mesh = toy_mesh()
    model, optimizer = toy(mesh)
    with StopRequest() as stop:
        quiet = stop.agreed(mesh)
        for step in range(10):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            result = train_step(
                model, optimizer, toy_batches(step, mesh), mesh, RunClock(0),
                step=step, lr=1e-2, clip_norm=1.0, requests=StepRequests(stop=stop.requested),
            )  # fmt: skip
            if result.requests.stop:
                return step, quiet, stop.agreed(mesh)
    raise AssertionError("nobody stopped")


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step() -> None:
    assert launch(_stop_one, 2) == [(3, False, True)] * 2
