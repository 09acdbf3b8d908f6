"""Two files of a run's folder: `.lock`, so that one run uses it, and `state.json`, the state of the newest start.

The lock is a POSIX record lock (`fcntl.lockf`): the kernel drops it when the process ends; forked loader workers do not
inherit it; and it works between hosts. If a file system has no locks, the run warns and trains without one.

torchrun turns every exit code of its workers into 1, so `state.json` records what a restart needs:

    state           `running` or one of errors.ExitCode; `running` of a process that is gone means that it was killed
    step            of the last save while the run trains, of the last step begun at its end, as in metrics.jsonl
    checkpoint      the step of the newest one, 0 if the run has none
    save_index      the highest that a checkpoint of the run got
    reason          of the end
    start           RUN_ID, by which a scheduler's script knows its own start
    pid, host, time

The first rank writes the file, and only while it holds the lock: a refused start does not touch another run's.

If `checkpoint` is not 0 and `checkpoints/` is empty, a disk is not mounted or a folder is lost. Then the start is
refused (checkpoint/find.py) and does not change the file, which may be the only trace of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fp4.config.errors import hidden
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.parallel.mesh import EXIT_SECONDS
from megatron_fp4.runtime.errors import ExitCode, StoppedError, exit_code_of, is_user_error, report_error_once
from megatron_fp4.runtime.progress import FOLDER as RANKS
from megatron_fp4.runtime.progress import Progress

log = logging.getLogger(__name__)

LOCK_FILE, STATE_FILE = ".lock", "state.json"
# An earlier run that is ending may need EXIT_SECONDS.
LOCK_SECONDS = EXIT_SECONDS + 30.0


def written_folders(config: Config) -> list[str]:
    """The folders in run.dir that a run needs until its end."""
    return ["checkpoints", RANKS, *(["exports"] if config.checkpoint.export_interval else [])]


def try_folder(run_dir: Path, name: str = "", make: bool = False) -> None:
    """Write to `run_dir`, or to the folder `name` in it, and leave nothing behind. make: make the folder if it is
    missing; otherwise write to the next one above it that exists. Raises ConfigError for a file or a link that leads
    nowhere; OSError."""
    folder = run_dir / name
    here = folder.absolute()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(here)  # raises for a name that is too long, which `lexists` does not
    while not os.path.lexists(here):
        here = here.parent
    if not here.is_dir():
        is_link = here.is_symlink()
        what = f"a link to {os.readlink(here)}, which is missing" if is_link else "a file, not a folder"
        remedy = "mount or make that, or remove the link" if is_link else "choose another run.dir"
        raise ConfigError(f"run.dir={run_dir} cannot be written to: {here} is {what}; {remedy}")
    if make:
        folder.mkdir(parents=True, exist_ok=True)
        here = folder
    with tempfile.TemporaryFile(dir=here) as file:  # without a name, which a killed process would leave
        file.write(b"x")


def cannot_be_written(run_dir: Path, error: OSError) -> ConfigError:
    """The refusal of a run.dir with this error."""
    return ConfigError(f"run.dir={run_dir} cannot be written to ({error.strerror or error}); choose another run.dir")


@contextlib.contextmanager
def sole_run(
    run_dir: Path, asked_to_stop: Callable[[], bool] = lambda: False, folders: Sequence[str] = ()
) -> Iterator[None]:
    """Hold the lock of `run_dir` inside. A collective; the first rank locks. folders: names of folders in it, made
    and written to once it is locked, because a run that cannot save should end here.

    If another run holds the lock, prints that and waits up to `LOCK_SECONDS`. Raises on all ranks: ConfigError if that
    run does not end, or if the folder cannot be written to; StoppedError if the first rank is asked to stop meanwhile;
    RuntimeError if the disk fails.
    """
    failed: list[Exception | None] = [None]
    descriptor = None
    try:
        if dist.get_rank() == 0:
            try:
                try_folder(run_dir, make=True)
                descriptor = _open_lock(run_dir)
                _acquire(descriptor, run_dir, asked_to_stop)
                for name in folders:
                    try_folder(run_dir, name, make=True)
            except OSError as error:
                refusal = cannot_be_written(run_dir, error)
                failed[0] = refusal if is_user_error(error) else RuntimeError(str(refusal))
            except (ConfigError, StoppedError) as error:
                failed[0] = error
        dist.broadcast_object_list(failed)
        if failed[0] is not None:
            raise failed[0]
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)  # releases the lock


def _open_lock(run_dir: Path) -> int:
    return os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _acquire(descriptor: int, run_dir: Path, asked_to_stop: Callable[[], bool]) -> None:
    """Lock the open file and write this process's id into it. Raises as `sole_run` if another keeps the lock."""
    began = None
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError) as error:  # both mean that another process holds it
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another run"
            if began is None:
                began = time.monotonic()
                log.warning("run.dir=%s: waiting up to %.0f s for %s to leave", run_dir, LOCK_SECONDS, holder)
            if asked_to_stop():
                raise StoppedError(f"run.dir={run_dir}: stopped while waiting for {holder} to leave") from error
            if time.monotonic() - began >= LOCK_SECONDS:
                raise ConfigError(
                    f"run.dir={run_dir}: {holder} is still writing there; stop it or wait for its end, or choose "
                    "another run.dir"
                ) from error
            time.sleep(0.2)
        except OSError as error:
            log.warning("run.dir=%s: its file system has no locks (%s); start no second run there", run_dir, error)
            return
    with contextlib.suppress(OSError):  # on a full disk the lock has no name in it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


class RunState:
    """Writes the state of a start: `running` on entering the context, at the end that of `ended` or of the exception.

    active: whether this rank writes. progress: has the step of an exception. from_scratch: it begins at step 0 anyway.
    """

    def __init__(self, run_dir: Path, active: bool, progress: Progress, from_scratch: bool = False) -> None:
        lost = has_lost_checkpoints(run_dir)
        self._run_dir, self._progress = run_dir, progress
        self._active = active and (from_scratch or not lost)
        self._checkpoint = 0 if lost else number_in_state(run_dir, "checkpoint")
        self._now, self._save_index = ("running", 0, ""), 0

    def __enter__(self) -> RunState:
        self._write(*self._now)
        self._progress.on_hang = self._hung
        return self

    def saved(self, step: int, save_index: int) -> None:
        """Record that the checkpoint of `step` is the newest; on the first rank, from any thread."""
        self._checkpoint, self._save_index = step, save_index
        state, begun, reason = self._now
        self._write(state, max(begun, step), reason)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._progress.on_hang = None
        # If another rank hung and this one failed while it waited, the state stays `hung`.
        if error is not None and read_state(self._run_dir).get("state") != ExitCode.HUNG.state:
            self._write(exit_code_of(error).state, self._progress.place.step, f"{type(error).__name__}: {error}")

    def ended(self, code: ExitCode, step: int, reason: str = "") -> ExitCode:
        """Record that this start ended with `code` after `step` steps, wait for all ranks, and return `code`.

        A collective, because torchrun ends all workers as soon as one exits with a code other than 0.
        """
        self._write(code.state, step, reason)
        dist.all_reduce(torch.zeros(1))  # on the CPU, by gloo: does not wait for a GPU
        return code

    def _hung(self, step: int, reason: str) -> None:
        """Record that this rank hangs. Any rank does so, because no other rank knows."""
        write_state(self._run_dir, ExitCode.HUNG.state, step, reason, number_in_state(self._run_dir, "checkpoint"))

    def _write(self, state: str, step: int, reason: str) -> None:
        self._now = state, step, reason
        if self._active:
            write_state(self._run_dir, state, step, reason, self._checkpoint, self._save_index)


def write_state(run_dir: Path, state: str, step: int | None, reason: str, checkpoint: int, save_index: int = 0) -> None:
    """Replace `state.json` of `run_dir`; a higher save index stays. Logs a warning if the disk refuses it."""
    record = {
        "state": state,
        "step": step,
        "checkpoint": checkpoint,
        "save_index": max(save_index, number_in_state(run_dir, "save_index")),
        "reason": hidden(reason),
        "start": os.environ.get("RUN_ID", ""),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    temporary = run_dir / f"{STATE_FILE}.tmp"
    try:
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        temporary.replace(run_dir / STATE_FILE)
    except OSError as error:
        log.warning("could not write %s: %s", run_dir / STATE_FILE, error)


def read_state(run_dir: Path) -> dict[str, Any]:
    """The content of `state.json`; empty if it cannot be read."""
    try:
        record = json.loads((run_dir / STATE_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def number_in_state(run_dir: Path, key: str) -> int:
    """The `checkpoint` or the `save_index` in `state.json`; 0 if there is none."""
    number = read_state(run_dir).get(key)
    return number if isinstance(number, int) else 0


def has_lost_checkpoints(run_dir: Path) -> bool:
    """Whether `state.json` names a checkpoint although `run_dir` has none."""
    return number_in_state(run_dir, "checkpoint") > 0 and not any(run_dir.glob("checkpoints/step_*"))


def report_ending(error: Exception, run_dir: str | None, ended: Callable[[], bool] = lambda: False) -> ExitCode:
    """Print the line of an expected error that ended a run; returns the exit code. One rank prints it.

    run_dir: where to record a refusal before the lock; None: nowhere. ended: whether this process was asked to end.
    """
    code = exit_code_of(error)
    if report_error_once(f"pretrain.py: {error}", ended) and code is ExitCode.REFUSED and run_dir is not None:
        note_refusal(Path(run_dir), str(error))
    return code


def note_refusal(run_dir: Path, reason: str) -> None:
    """Record that a start was refused before it locked `run_dir`. Does nothing if another run holds the lock, the
    folder does not exist, or its checkpoints are lost."""
    with contextlib.suppress(OSError):
        descriptor = _open_lock(run_dir)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not has_lost_checkpoints(run_dir):
                write_state(run_dir, ExitCode.REFUSED.state, None, reason, number_in_state(run_dir, "checkpoint"))
        finally:
            os.close(descriptor)
