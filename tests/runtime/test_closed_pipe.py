"""Commands whose reader has left, as `| head -1` does: nothing on stderr, and what is to be cleaned up is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.programs import ROOT

PROGRAM = """
import sys
from megatron_fp4.runtime.closed_pipe import end_without_reader

end_without_reader()
try:
    print({printed})
except OSError:
    print("caught by those who expect files to fail", file=sys.stderr)
finally:
    print("cleaned up", file=sys.stderr)
sys.exit(3)
"""


def into_closed_pipe(*arguments: str | Path, **environment: str) -> tuple[int, str]:
    """Exit code and stderr of a Python program whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", **environment},
        )  # fmt: skip
    finally:
        os.close(writer)
    return done.returncode, done.stderr


def test_a_program_ends_where_it_prints() -> None:
    """With its own exit code if it was done by then; and what is read arrives."""
    assert into_closed_pipe("-c", PROGRAM.format(printed="'x' * 100_000")) == (141, "cleaned up\n")
    assert into_closed_pipe("-c", PROGRAM.format(printed="'x'"), PYTHONUNBUFFERED="1") == (141, "cleaned up\n")
    assert into_closed_pipe("-c", PROGRAM.format(printed="'x'")) == (3, "cleaned up\n")
    program = PROGRAM.format(printed="'é' * 100_000, end='.'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    read = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
    assert (read.returncode, read.stdout.decode()) == (3, "é" * 100_000 + ".")


def test_every_script_says_so() -> None:
    scripts = list((ROOT / "scripts").glob("[a-z]*.py"))
    begins = 'if __name__ == "__main__":\n    import _command  # noqa: F401\n'
    assert scripts and [path.name for path in scripts if begins not in path.read_text()] == []
