"""The end of the process of a run: nothing that happened is lost, and nothing hangs.

A finished or stopped run has written everything before it comes here. It leaves the process group with little
patience, since groups were seen to hang in their end for minutes, and the process ends with the run's own exit code
either way. A run that failed does not wait for its group at all: other ranks may never come. It says why first.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from megatron_fp4.parallel.mesh import end_process, leave_distributed
from megatron_fp4.runtime.closed_pipe import EXIT_CODE as CLOSED_PIPE
from megatron_fp4.runtime.closed_pipe import ReaderLeftError
from megatron_fp4.runtime.exit_codes import ExitCode, exit_code_of
from megatron_fp4.runtime.run_state import note_refusal
from megatron_fp4.runtime.said_once import report_to_torchrun, say_once

# Seconds for a process group to end.
PATIENCE = 10.0


def run_program(body: Callable[[], int]) -> NoReturn:
    """Run `body`, the whole of a program, and end the process with its exit code, 1 if it raises."""
    faulthandler.enable()  # where a crash in C was
    try:
        code = body()
    except KeyboardInterrupt:  # of a program that does not listen, such as --check: a person knows why it ends
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        end_process(128 + signal.SIGINT)
    except ReaderLeftError:  # of what --check or a dry run says
        end_process(CLOSED_PIPE)
    except BaseException as error:
        say(error)
        if notes := getattr(error, "__notes__", None):
            print("\n".join(notes), file=sys.stderr, flush=True)
        record_for_torchrun(error)
        end_process(ExitCode.CRASHED)
    leaving = threading.Thread(target=leave_distributed, name="leaving", daemon=True)
    leaving.start()
    leaving.join(PATIENCE)
    if leaving.is_alive():
        print(
            f"pretrain.py: its process group has not ended after {PATIENCE:.0f} s; leaving without it. Everything is "
            f"written; exit code {int(code)}",
            file=sys.stderr,
            flush=True,
        )
    end_process(code_for_launcher(code))


def code_for_launcher(code: int) -> int:
    """What a run that ends with `code` tells torchrun: one that has restarts left (`--max-restarts`) would start a run
    that was asked to stop again, so there that is no failure."""
    done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return ExitCode.FINISHED if code == ExitCode.STOPPED and done < most else code


class SaidAtOnce:
    """A context whose unforeseen exceptions are on stderr before anything else is left: outer contexts, such as a save
    in the background, may take their time, or hang."""

    def __enter__(self) -> SaidAtOnce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and exit_code_of(error) is ExitCode.CRASHED:
            say(error)


def say(error: BaseException) -> None:
    """Print the traceback of `error` on stderr, once."""
    if not getattr(error, "_said", False):
        traceback.print_exception(error)
        sys.stderr.flush()
        error._said = True  # type: ignore[attr-defined]


def explain(error: Exception, run_dir: str | None, ended: Callable[[], bool] = lambda: False) -> ExitCode:
    """Say in one line why a run ended by a foreseen error; returns the exit code. Of the ranks that have the error one
    says it (said_once.py).

    run_dir: where to write down a refusal that came before the run had its folder, None for nowhere. ended: whether
    this process was asked to end.
    """
    code, line = exit_code_of(error), f"pretrain.py: {error}"
    if say_once(line, ended):
        if code is ExitCode.REFUSED and run_dir is not None:
            note_refusal(Path(run_dir), str(error))
        report_to_torchrun(line)
    return code


def record_for_torchrun(error: BaseException) -> None:
    """Let torchrun's report of failed workers show `error`; only while it is being handled."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)
