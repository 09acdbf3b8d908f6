"""What each command imports first, when it is run as a program: it finds the rooms beside it; without the packages it
ends in one line, as pretrain.py does; after Ctrl-C, or when nobody reads its output any more, without a traceback."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_fp4.answers import missing_packages
from megatron_fp4.runtime.closed_pipe import end_without_reader


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):  # a person knows why it ends
        os.write(2, b"\n")
        sys.exit(130)
    sys.__excepthook__(kind, error, trace)


if line := missing_packages():
    print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)
    sys.exit(2)
sys.excepthook = _print_error
end_without_reader()
