"""torchrun that ends as its run ends: `python -m megatron_fp4.launch --nproc-per-node 8 pretrain.py ...`.

Takes torchrun's arguments and starts workers by torchrun's own code. Only the end is different:

    a signal    (Ctrl-C, TERM, USR1, ...) is handed to the workers, which save and leave. torchrun dies of USR1 and of
                USR2, gives workers 30 seconds after any other, and then prints a traceback of its own.
    exit code   what the run ended with (`ExitCode`, or 128 + the number of a second signal), where torchrun makes 1 of
                everything. With workers on several nodes each launcher tells that of its own.
    report      torchrun's of a crash, without the traceback of the launcher, which is the same whatever went wrong. Of
                what the run itself has said in one line there is none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from megatron_fp4.runtime.signals import NO_SIGNALS, SIGNALS

# Of `ExitCode`, whose module imports torch; this one has to listen before that.
_CRASHED, _HUNG, _STOPPED = 1, 5, 75
# The signals that this process got while it had workers: handlers have nowhere else to leave them.
_handed_on: set[int] = set()


def main(arguments: list[str]) -> int:
    """Run torchrun with its command line's `arguments`; returns the exit code."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's
            signal.signal(number, _hand_on)
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What it says of failed workers on their way down is in its report too, if there is one.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    options = torchrun.parse_args(arguments)
    options.signals_to_handle = NO_SIGNALS
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        code = exit_code({rank: failure.exitcode for rank, failure in error.failures.items()})
        if code == _CRASHED:
            print(error, file=sys.stderr, flush=True)
        return code
    except SignalException as error:
        return 128 + error.sigval
    return 0


def exit_code(failed: dict[int, int]) -> int:
    """That of a run of whose workers these have failed: rank -> exit code, negative if a signal ended it.

    torchrun sends TERM to those that are left, so what one of them chose itself tells more than a signal does.
    """
    codes = [code for _, code in sorted(failed.items())]
    if len(set(codes)) == 1 and -codes[0] in _handed_on:
        return 128 - codes[0]  # so early that no worker listened yet
    chosen = [code for code in codes if code > 0]
    if _HUNG in chosen:  # the others failed of waiting for it
        return _HUNG
    # A run that was told twice to leave has workers that were still saving.
    return next((code for code in chosen if code != _STOPPED), _STOPPED if chosen else _CRASHED)


def _hand_on(number: int, frame: FrameType | None) -> None:
    if not (workers := _workers()):
        sys.exit(128 + number)
    _handed_on.add(number)
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)


def _workers() -> list[int]:
    """The children of this process that lead a session: torchrun's workers, and nothing that libraries start."""
    found, parent = [], str(os.getpid())
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            # The name in parentheses may hold spaces; after it: state, parent, process group, session.
            fields = path.read_text().rpartition(")")[2].split()
            if fields[1] == parent and fields[3] == path.parent.name and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
