"""Each script imports this first when it runs as a program.

The script then imports the packages of its own checkout, ends with one line if packages are missing, as pretrain.py
does, and prints no traceback after Ctrl-C or when the reader of its output has left. A run starts scripts as its
children, with `--beside PROCESS`: they get the lowest priority, and the kernel kills them when the run ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

if "--beside" in sys.argv[1:-1]:  # before torch is imported, which takes seconds
    import ctypes
    import signal

    at = sys.argv.index("--beside")
    parent = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG of linux/prctl.h
    if str(os.getppid()) != parent:  # the run ended before the line above
        os._exit(1)
    os.nice(19)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_fp4.answers import missing_packages
from megatron_fp4.runtime.closed_pipe import end_without_reader


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        os.write(2, b"\n")
        sys.exit(130)
    sys.__excepthook__(kind, error, trace)


if line := missing_packages():
    print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)
    sys.exit(2)
sys.excepthook = _print_error
end_without_reader()
