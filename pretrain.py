"""Train a model.

    torchrun --nproc-per-node 8 pretrain.py model=nemotron_h_8b precision=nvfp4 data=my_corpus run.dir=runs/8b
    python pretrain.py --help                            every group and key
    python pretrain.py --check ...                       would a start work, and what does the run need?
    WORLD_SIZE=736 python pretrain.py ... run.dry=true   what 736 ranks would need: memory, messages, time

To resume from the newest checkpoint in run.dir, run the same command again. A signal (TERM, USR1, HUP, INT, QUIT), a
file run.dir/STOP or run.max_minutes stops the run after a step, with a checkpoint; a second signal, 5 seconds later,
ends it at once. Exit codes, also in run.dir/state.json:

    0  finished                             4  wrong numbers: a fault of hardware or kernels
    2  refused: one line says what to fix   5  hung: a section made no progress
    3  diverged: too many skipped steps     75 stopped on request, and saved
    1  anything else
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, in which no signal must be lost
    import gc
    import sys
    from pathlib import Path

    from megatron_fp4.answers import answer
    from megatron_fp4.runtime.signals import stop_request

    STOP = stop_request(sys.argv[1:])
    if (code := answer(sys.argv[1:], Path(__file__).with_name("configs"))) is not None:
        sys.exit(code)
    gc.disable()  # until the end of this file: imports make hardly any garbage

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data import provider as data
from exchange.architectures import export_command
from exchange.exports import Exports, KeptTokenizer, last_exportable
from inference.prompts import Prompts
from megatron_fp4.config.checks import check_launch
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import Config
from megatron_fp4.logging.run_log import TimeLedger
from megatron_fp4.parallel.mesh import leave_distributed
from megatron_fp4.runtime.errors import ExitCode, PrintableRecords, exit_code_of, run_program
from megatron_fp4.runtime.progress import Progress, record_collectives
from megatron_fp4.runtime.run_state import RunState, report_ending, sole_run, written_folders
from megatron_fp4.runtime.signals import StopConditions, StopRequest
from megatron_fp4.training.build import configuration_errors, device_type_of, join_ranks, plans_of
from megatron_fp4.training.callbacks.bad_steps import SkippedSteps, Spikes
from megatron_fp4.training.callbacks.experts import Experts
from megatron_fp4.training.callbacks.kernels import Kernels
from megatron_fp4.training.callbacks.mtp import FurtherLosses
from megatron_fp4.training.callbacks.numerics import LinearCheck, QuantizationDiagnostics, ReplayCheck, SelfTest, Switch
from megatron_fp4.training.callbacks.profiling import Profile
from megatron_fp4.training.callbacks.replicas import Replicas
from megatron_fp4.training.callbacks.reporting import Banner, LiveReport, Records, Summary, report
from megatron_fp4.training.callbacks.validation import Validation
from megatron_fp4.training.trainer import Callback, Trainer, check_start
from models import provider as models

CONFIGS = Path(__file__).resolve().parent / "configs"


def main(arguments: list[str], signals: StopRequest | None = None) -> int:
    """Run the command; returns the exit code.

    arguments: Hydra overrides and `--check`. signals: listens since the process began; the process ends with the run.
    None: the process continues after the run, so its signal handlers are restored and its process group is left.
    """
    if signals is None:
        with StopRequest() as signals:
            try:
                return main(arguments, signals)
            finally:
                leave_distributed()
    times, progress = TimeLedger(signals.began), Progress()
    progress.observer = times.at
    with progress.limited():  # before the first file is touched
        return run(arguments, signals, times, progress)


def run(arguments: list[str], signals: StopRequest, times: TimeLedger, progress: Progress) -> int:
    """`main`, once its sections have limits."""
    progress.at(0, "configuration")
    checks, overrides = "--check" in arguments, [argument for argument in arguments if argument != "--check"]
    run_dir = next((part.removeprefix("run.dir=") for part in overrides if part.startswith("run.dir=")), None)
    try:
        config = configure(overrides, progress)
        if checks or config.run.dry:
            signals.decline()
            from megatron_fp4.planning.needs import print_check, print_dry_run  # imports much that a run does not need

            (print_check if checks else print_dry_run)(config, models, data)
            return ExitCode.FINISHED
        check_launch()
        with only_run(config, times, signals, progress) as (trainer, state):
            stops = StopConditions(Path(config.run.dir), config.run.max_minutes, signals, trainer.mesh.rank == 0)
            code = state.ended(*trainer.train(stops))
            signals.ignore()  # first: torchrun may already be ending the other ranks
            if code is ExitCode.FINISHED:
                report(trainer, CONFIGS)
        return code
    except Exception as error:
        if exit_code_of(error) is ExitCode.CRASHED:
            raise
        signals.ignore()
        return report_ending(error, None if checks else run_dir, lambda: signals.requested)


def configure(overrides: list[str], progress: Progress | None = None) -> Config:
    """Compose and check the configuration. progress: gets its timeout early. Raises ConfigError."""
    config = compose_config(overrides, CONFIGS)
    if progress is not None:
        progress.timeout_seconds = config.parallel.timeout_seconds
    with configuration_errors():  # also of a path that no disk can have
        check_start(config, models, data)
        if config.checkpoint.export_interval:
            last_exportable(config, plans_of(config, models))
    return config


@contextmanager
def only_run(
    config: Config, times: TimeLedger, signals: StopRequest, progress: Progress
) -> Iterator[tuple[Trainer, RunState]]:
    """Inside, this process holds run.dir alone; yields the trainer and the run's state.json."""
    run_dir = Path(config.run.dir)
    progress.at(0, "process group")
    record_collectives(run_dir)
    mesh = join_ranks(config, models)
    logging.basicConfig(level=logging.WARNING if mesh.rank else logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PrintableRecords("%(message)s"))
    progress.at(0, "lock")
    with (
        sole_run(run_dir, lambda: signals.requested, written_folders(config)),
        RunState(run_dir, mesh.rank == 0, progress, from_scratch=config.checkpoint.resume == "never") as state,
        progress.watched(run_dir),
    ):
        trainer = Trainer(config, models, data, callbacks_of(config), mesh, progress, times=times)
        trainer.checkpointer.published = state.saved
        yield trainer, state


def callbacks_of(config: Config) -> list[Callback]:
    """What the run does besides training steps. The order matters: kernels, for example, are pinned before one runs."""
    callbacks = [
        Banner(),
        Kernels(data.default_cache_dir() / "autotuning") if device_type_of(config) == "cuda" else None,
        SelfTest(),
        LinearCheck() if config.precision.recheck_interval else None,  # raises before others use the step's numbers
        Switch(),  # before all callbacks that read a recipe
        Experts(),  # changes buffers, which others compare, save and use
        FurtherLosses(),
        ReplayCheck() if config.run.replay_interval else None,
        QuantizationDiagnostics() if config.precision.diagnostics.interval else None,
        SkippedSteps(config.train.max_skipped_steps, config.train.steps),
        KeptTokenizer(),
        Records(),  # after measurements, which are part of a step's time
        Replicas() if config.run.replicas_interval else None,
        Spikes(config.spikes),  # may roll back, after the step's record
        Validation(),  # after a rollback, before a save
        Prompts() if config.validation.prompts else None,
        Exports(last_exportable(config, plans_of(config, models))) if config.checkpoint.export_interval else None,
        LiveReport(config.logging.report_minutes) if config.logging.report and config.logging.report_minutes else None,
        Summary(export_command(config.model)),
        Profile() if config.logging.profile_steps else None,  # innermost: it measures only the step
    ]
    return [callback for callback in callbacks if callback is not None]


if __name__ == "__main__":
    gc.freeze()  # imported objects stay: no later collection scans them
    gc.enable()
    run_program(lambda: main(sys.argv[1:], STOP))
