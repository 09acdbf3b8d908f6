"""The process that exports a checkpoint beside a run.

`scripts/export_hf.py` with the lowest priority, without a GPU and without what a launcher tells ranks, in the run's own
working directory, where the paths of its configuration are true. It ends with the process that started it
(as_child.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONS: dict[str, tuple[str, ...]] = {
    "bf16": ("--dtype", "bfloat16"),
    "fp32": ("--dtype", "float32"),
    "nvfp4": ("--format", "nvfp4"),
    "nvfp4-compressed-tensors": ("--format", "nvfp4-compressed-tensors"),
}
"""`checkpoint.export_format` -> what scripts/export_hf.py is told."""
_PATIENCE = 5.0
# What a launcher tells a rank, which the export is not.
_OF_RANKS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+|MASTER_\w+|TORCHELASTIC_\w+)"
)


def export_command(checkpoint: Path, output: Path, export_format: str) -> list[str]:
    """The command that exports `checkpoint` as `output`, for a shell where `python` is the run's, or of an installed
    package the command `megatron-fp4` is."""
    script = str(ROOT / "scripts" / "export_hf.py")
    installed = (ROOT.parent / "command.py").is_file()  # this room is in the package's folder then
    command = ["megatron-fp4", "export_hf"] if installed else ["python", script]
    return [*command, str(checkpoint), str(output), *OPTIONS[export_format]]


class ExportProcess:
    """An export that is being written. command: as `export_command` gives it. Raises OSError if none can be started."""

    def __init__(self, command: Sequence[str]) -> None:
        program, *arguments = command
        ours = {"python": [sys.executable], "megatron-fp4": [sys.executable, "-P", "-m", "megatron_fp4"]}
        words = [*ours.get(program, [program]), *arguments]
        environment = {name: value for name, value in os.environ.items() if not _OF_RANKS.fullmatch(name)}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._began = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "exchange.as_child", str(os.getpid()), *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a signal from the terminal is for the run to obey
            )
        except OSError:
            self._said.close()
            raise

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._began

    @property
    def ended(self) -> bool:
        """Whether it has come to its end."""
        return self._process.poll() is not None

    def close(self) -> str | None:
        """Behind its end: why there is no export, by what it has said last; None if there is one."""
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 4096))
        lines = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        self._said.close()
        if (code := self._process.returncode) == 0:
            return None
        return lines[-1] if lines else f"it ended with code {code} and said nothing"

    def kill(self) -> None:
        """End it, and what it has started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)
                break
        self._said.close()
