"""Train a model: compose the configuration, build the parts, run the loop.

    torchrun --nproc-per-node 8 pretrain.py model=nemotron_h_8b precision=nvfp4 data=my_corpus run.dir=runs/8b
    python pretrain.py --help           every group and key
    python pretrain.py --version
    python pretrain.py --check ...      whether a start would go well (on WORLD_SIZE ranks), and what the run takes
    WORLD_SIZE=736 python pretrain.py ... run.dry=true       what it would need there: memory, messages, time

Started again with the same run.dir it resumes from the newest checkpoint, or says that the run is finished; while
another run is there it waits, and then refuses. A signal (TERM, USR1, HUP, INT, QUIT), a file run.dir/STOP or
run.max_minutes stop it after a step, with a checkpoint. Exit codes, and states in run.dir/state.json:
0 finished; 75 stopped on request and saved; 2 refused, in one line on stderr: the configuration is wrong; 3 diverged:
too many steps in a row were skipped, or all of them; 4 wrong numbers: hardware or kernels compute something else than
they should; 1 anything else. A second signal, 5 seconds after the first or later, leaves at once with 128 plus its
number.
"""

from __future__ import annotations

if __name__ == "__main__":  # before torch is imported, which takes seconds: a signal then must not be lost
    import gc
    import sys
    from pathlib import Path

    from megatron_fp4.answers import answer
    from megatron_fp4.runtime.signals import stop_request

    STOP = stop_request(sys.argv[1:])
    if (code := answer(sys.argv[1:], Path(__file__).with_name("configs"))) is not None:
        sys.exit(code)
    gc.disable()  # until the end of this file: of what imports make, hardly anything is garbage

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from assembly import build, configuration_errors, configure, device_type_of, set_determinism
from data.storage import default_cache_dir
from inference.in_run import text_samples
from introduction import introduce_run, print_needs, say_all, say_what_differs, sizes
from megatron_fp4.checkpoint.checkpointer import CheckpointGoneError
from megatron_fp4.checkpoint.files import origin_state
from megatron_fp4.checkpoint.find import would_overwrite
from megatron_fp4.config.launcher import check_launch
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.logging.files import REPORT_FILE
from megatron_fp4.logging.goodput import TimeLedger
from megatron_fp4.logging.summary import Missing, missing_of, summarize
from megatron_fp4.measure.measurements import Measurements
from megatron_fp4.measure.nonfinite import diagnose_nonfinite
from megatron_fp4.measure.spike_diagnosis import diagnose_spike
from megatron_fp4.parallel.mesh import build_mesh, init_distributed, leave_distributed
from megatron_fp4.precision import verify
from megatron_fp4.runtime.ending import SaidAtOnce, explain, run_program
from megatron_fp4.runtime.exit_codes import DivergedError, ExitCode, WrongNumbersError
from megatron_fp4.runtime.flight_recorder import record_collectives
from megatron_fp4.runtime.orders import Orders
from megatron_fp4.runtime.progress import Progress
from megatron_fp4.runtime.run_lock import sole_run
from megatron_fp4.runtime.run_state import RunState
from megatron_fp4.runtime.signals import StopRequest
from megatron_fp4.training.autotuning import rehearsal
from megatron_fp4.training.evaluate import evaluate
from megatron_fp4.training.profiling import ProfileWindow, memory_history
from megatron_fp4.training.spikes import Spike
from megatron_fp4.training.step import StepRequests, train_step
from preflight import check_samples, print_check
from run_parts import Run


def main(arguments: list[str]) -> int:
    """`launch` in a process that lives on: gives back signals and process group."""
    with StopRequest() as signals:
        try:
            return launch(arguments, signals)
        finally:
            leave_distributed()


def launch(arguments: list[str], signals: StopRequest) -> int:
    """Run pretrain.py with Hydra overrides and `--check` as `arguments`; returns the exit code. signals: listens
    already."""
    overrides = [argument for argument in arguments if argument != "--check"]
    run_dir = None
    try:
        if checks := overrides != arguments:
            signals.decline()
        else:
            run_dir = next((part.partition("=")[2] for part in overrides if part.startswith("run.dir=")), None)
        config = configure(overrides)
        if checks:
            return print_check(config)
        if config.run.dry:
            signals.decline()
            return print_needs(config)
        check_launch()
        return pretrain(config, signals)
    except (ConfigError, DivergedError, WrongNumbersError, verify.SelfTestError) as error:
        signals.hush()
        return explain(error, run_dir, lambda: signals.requested)


def pretrain(config: Config, signals: StopRequest) -> int:
    """Build the parts and run them, as the only run in its folder; returns the exit code."""
    run_dir, timeout, progress = Path(config.run.dir), config.parallel.timeout_seconds, Progress()
    record_collectives(run_dir)
    device = init_distributed(device_type_of(config), timeout)
    set_determinism(config.run.deterministic)
    mesh = build_mesh(config.parallel, device)
    first_rank = mesh.rank == 0
    logging.basicConfig(level=logging.INFO if first_rank else logging.WARNING, format="%(message)s")
    progress.observer = ledger = TimeLedger(signals.began)
    with (
        sole_run(run_dir),
        RunState(run_dir, first_rank, progress) as state,
        progress.watched(run_dir, timeout),
    ):
        progress.at(0, "build")
        run = build(config, mesh, progress)
        run.log.times = ledger
        orders = Orders(run_dir, config.run.max_minutes, signals, active=first_rank)
        code = run_to_end(run, orders, state)
        signals.over()  # first: torchrun may already be ending whoever is still there
        wanted = run.log.opened or not (run_dir / REPORT_FILE).exists()
        if wanted and code is ExitCode.FINISHED and config.logging.report:
            say_all(config, run.log.console)
        return code


def run_to_end(run: Run, orders: Orders, state: RunState) -> ExitCode:
    """Resume, train, save, summarize; returns the exit code."""
    config, mesh, log, run_dir = run.config, run.mesh, run.log, Path(run.config.run.dir)
    run.progress.at(0, "load")
    start, steps, first_rank = resume(run), config.train.steps, mesh.rank == 0
    missing = None
    if start == steps:
        missing = missing_of(run_dir, steps, validates=bool(run.validation), others=run.exports.lacking)
    if missing is not None and not (missing.names and run.checkpointer.has(steps)):
        log.console.text(
            f"{run_dir} is finished: the checkpoint it starts from is of step {start} of {steps}. Raise train.steps "
            "to go on, or choose another run.dir."
        )
        return state.ended(ExitCode.FINISHED, start)

    entropy = {name: yardstick.unigram_entropy for name, yardstick in run.yardsticks.items()}
    plan = run.controller.plans[0].as_dict()
    log.open(
        start,
        steps=steps,
        decay_start=run.schedule.decay_start_step + 1,
        unigram_entropy=entropy,
        world_size=mesh.world_size,
        optimizer=run.optimizer.name,
        plan=plan,
        **sizes(run),
        resume=config.checkpoint.resume,
        origin=origin_state(run.checkpointer.origin),
        initialized_from=origin_state(run.checkpointer.initialized_from),
    )
    if missing is None:
        introduce_run(run, start)
    run.progress.at(0, "tune and test kernels")
    pin_autotuned(run, start)
    test_backend(run)
    run.checkpointer.prepare(run.model, run.optimizer.optimizer)
    run.checkpointer.saves.before_publish = log.sync
    run.checkpointer.saves.needed = run.exports.protected
    log.settings(plan)
    with (
        log,
        memory_history(run_dir, active=config.logging.memory_history and first_rank),
        ProfileWindow(run_dir, config.logging.profile_steps, mesh.device, active=first_rank) as window,
        run.checkpointer,
        run.exports,
        SaidAtOnce(),
    ):
        run.exports.begin(start)
        steps_done, losses = train(run, start, orders, window) if missing is None else complete(run, missing)
        run.progress.at(steps_done, "save")
        run.checkpointer.finish()
        take_note_of_saves(run)
        exported = run.exports.finish(steps_done, lambda: orders.stop, mesh.device, run.progress)
        if steps_done == steps and not exported:
            orders.obeyed()
            log.stop(steps, orders.why_stop)
    run.progress.at(steps_done, "end")
    if steps_done < steps or not exported:
        log.stopped(start, steps_done, orders.why_stop)
        return state.ended(ExitCode.STOPPED, steps_done, orders.why_stop or "a request to another rank")
    if first_rank:
        bits, switched_at = run.bits_per_byte(losses), run.controller.switch.switched_at
        export = run.exports.last()
        summarize(log.console, config, run.tokens(steps), switched_at, losses, entropy, bits, export)
    return state.ended(ExitCode.FINISHED, steps_done)


def train(run: Run, start: int, orders: Orders, window: ProfileWindow) -> tuple[int, dict[str, float]]:
    """The loop, from `start` steps done to the end or a request to stop; returns steps done and validation losses."""
    config, model, mesh, controller, log = run.config, run.model, run.mesh, run.controller, run.log
    measurements = Measurements(config, model, mesh, controller, records=log.metrics, log=log.console)
    losses: dict[str, float] = {}
    if orders.agreed(mesh):  # nothing is new that would have to be saved
        log.stop(start, orders.why_stop)
        return start, losses
    batches = run.progress.loading(run.loader.steps(start, steps := config.train.steps), start + 1)
    for step, batch in enumerate(batches, start=start):
        began, done = time.perf_counter() - run.loader.data_wait, step + 1
        run.progress.at(done, "before the step")
        if run.graphs is not None and measurements.before_step(step):
            run.graphs.make_room()
        if controller.before_step(step, lambda: measurements.gradient_noise(step, batch).ratio):  # noqa: B023
            log.switch(step)
        run.spikes.enter(f"{run.phase(step)}, {run.plan_name}")
        run.progress.at(done, "replay")
        measurements.replay(step, batch)
        with measurements.of(step), window.step(step):
            result = train_step(
                model,
                run.optimizer.optimizer,
                batch,
                mesh,
                controller.clock,
                step=step,
                requests=StepRequests(orders.stop, orders.save, run.checkpointer.failed),
                **run.step_settings(step),
            )
        measurements.write(step)
        run.guard.observe(result, done, lambda: run.beside_graphs(diagnose_nonfinite, batch))  # noqa: B023
        log.step(run.step_metrics(step, result, time.perf_counter() - began), run.guard.state_dict())
        if spike := run.spikes.observe(result, done, run.checkpointer.last_step):
            answer_spike(run, spike, lambda: run.beside_graphs(diagnose_spike, batch, result))  # noqa: B023
        if done == steps or is_due(config.validation.interval, done):
            losses = validate(run, done)
        take_note_of_saves(run, result.requests.save_failed)
        ordered = result.requests.stop or result.requests.save
        if done == steps or ordered or is_due(config.checkpoint.interval, done) or run.exports.due(done):
            save(run, done, last=done == steps or result.requests.stop)
            orders.obeyed()
        if result.requests.stop and done < steps:
            log.stop(done, orders.why_stop)
            return done, losses
    return steps, losses


def complete(run: Run, missing: Missing) -> tuple[int, dict[str, float]]:
    """Write the records that a finished run lacks; returns its steps and its last validation losses."""
    steps, log, losses = run.config.train.steps, run.log, missing.losses
    log.console.text(f"{run.config.run.dir} is finished, but lacks {', '.join(missing.names)}; writing that now")
    if missing.validation:
        losses = validate(run, steps)
    if missing.checkpoint:
        log.metrics.event(steps, "checkpoint", path=str(run.checkpointer.folder(steps)))
    return steps, losses


def answer_spike(run: Run, spike: Spike, diagnose: Callable[[], str]) -> None:
    """Record a spike and its samples, and go back to the last checkpoint if the configuration says so and there is one.

    Raises SpikeError on all ranks if there were too many in a row.
    """
    restored = None
    action: str = run.config.spikes.action
    if spike.in_row >= run.config.spikes.max_in_row:
        answer, action = "the run ends", "end"
    elif action == "skip":
        answer = "skipped"
    elif run.checkpointer.last_step() is None:
        answer = "skipped, because there is no checkpoint yet to go back to"
    else:
        run.progress.at(spike.step, "go back to a checkpoint")
        try:
            restored = run.roll_back(spike.step)
            answer = f"went back to the checkpoint of step {restored}, and on with the next batch"
        except CheckpointGoneError as error:
            answer = f"skipped, because going back failed: {error}"
    first = spike.step - 1 if restored is None else restored
    run.log.spike(
        spike,
        answer,
        action=action if restored is not None or action == "end" else "skip",
        checkpoint=restored,
        steps=[first + 1, spike.step],
        samples=[run.samples(first), run.samples(spike.step) - 1],
        sources=[
            {"phase": found.phase, "source": found.source, "first": found.start, "last": found.end - 1}
            for found in run.phases.source_ranges(run.samples(first), run.samples(spike.step))
        ],
    )
    run.spikes.give_up(spike, diagnose)


def is_due(interval: int, done: int) -> bool:
    """Whether something that happens every `interval` steps (0: never) happens after `done` steps."""
    return interval > 0 and done % interval == 0


def validate(run: Run, step: int) -> dict[str, float]:
    """After `step` steps: measure and record the held-out losses, and texts if the configuration has prompts. Returns
    the losses by source."""
    config, losses = run.config, {}
    if run.graphs is not None:
        run.graphs.make_room()
    if run.validation:
        losses = validation_losses(run)
        run.log.validation(step, run.tokens(step), losses, run.bits_per_byte(losses))
    if config.validation.prompts:
        assert run.bundle.tokenizer is not None
        run.progress.at(step, "text samples")
        parts = run.model, run.controller, run.bundle.tokenizer, config.validation, config.run.seed, run.progress
        run.log.texts(step, text_samples(*parts))
    return losses


def validation_losses(run: Run) -> dict[str, float]:
    """Held-out loss per source."""
    size, mesh = run.config.train.micro_batch_size, run.mesh
    run.progress.at(run.controller.clock.step + 1, "validation")
    batches = {source.name: source.batches(size, mesh.dp_rank, mesh.dp_size) for source in run.validation}
    return evaluate(run.model, batches, mesh, run.controller.clock, run.progress)


def save(run: Run, step: int, last: bool = False) -> None:
    """Write the checkpoint of `step` steps done, or begin to. last: of this start."""
    run.progress.at(step, "save")
    if run.mesh.rank == 0:
        run.kernels.write(Path(run.config.run.dir))
    run.exports.want(step)
    run.checkpointer.save(
        step,
        run.model,
        run.optimizer.optimizer,
        run.state_dict(),
        consumed_samples=run.samples(step),
        consumed_tokens=run.tokens(step),
        last=last,
    )


def take_note_of_saves(run: Run, save_failed: bool = False) -> None:
    """Say which saves have ended, and begin the exports that are due of them. save_failed: of any rank."""
    reports = run.checkpointer.reports(save_failed)
    run.log.saves(reports)
    run.exports.saved(reports)


def resume(run: Run) -> int:
    """Load a checkpoint if the configuration says so; returns steps done.

    Raises ConfigError if the checkpoint is of another run or behind a switch that this one does not have, or going on
    would overwrite checkpoints of run.dir.
    """
    settings, checkpointer = run.config.checkpoint, run.checkpointer
    with configuration_errors():
        resumed = checkpointer.resume(
            settings.resume,
            run.model,
            run.optimizer.optimizer,
            run.controller.clock,
            allow_mismatch=settings.allow_mismatch,
        )
        start = resumed.step if resumed else 0
        if settings.initialize_from is not None:
            begun = checkpointer.initialize(
                settings.initialize_from,
                run.model,
                run.controller.clock,
                resumed=resumed is not None,
                allow_mismatch=settings.allow_mismatch,
            )
            if begun is not None:
                run.log.console.text(f"begins with the weights of {begun.path} (its step {begun.step})")
        if later := checkpointer.steps_after(start):
            raise ConfigError(would_overwrite(settings.resume, start, checkpointer.root, max(later)))
    if resumed is not None:
        with configuration_errors(f"checkpoint.resume={settings.resume} starts from step {start}: "):
            run.load_state_dict(resumed.trainer)
            check_samples(run.phases, start, run.loader.consumed_samples)
        say_what_differs(run, resumed)
    with configuration_errors():
        run.check_epochs()
    return start


def pin_autotuned(run: Run, start: int, record: bool = True) -> None:
    """Fix what autotuned kernels use, if there are any, before the first of them runs.

    record: write it down in run.dir.
    """
    mixers, whole = run.model.autotuned_mixers(), run.config.train.sequence_length
    if not mixers:
        return
    rehearse = rehearsal(
        mixers, run.config, (span.sequence_length or whole for span in run.phases.spans), run.mesh.device
    )
    for line in run.kernels.pin(rehearse, default_cache_dir() / "autotuning", resumed=start > 0):
        run.log.console.text(line)
    if record and run.mesh.rank == 0:
        run.kernels.write(Path(run.config.run.dir))


def test_backend(run: Run) -> None:
    """Compare native kernels with the reference, for this run's linears; raises SelfTestError if they differ."""
    if run.backend.name != "emulated":
        train, linears = run.config.train, run.controller.linears
        cases = verify.cases_of(run.controller.plans, linears, train.micro_batch_size * train.sequence_length)
        backend = next(iter(linears.values())).backend
        run.log.console.text(verify.require(backend, cases, run.mesh.device))


if __name__ == "__main__":
    gc.freeze()  # what is imported stays: no collection looks at it again, at the start or between two steps
    gc.enable()
    run_program(lambda: launch(sys.argv[1:], STOP))
