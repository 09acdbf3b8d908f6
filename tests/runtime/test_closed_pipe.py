"""Commands whose output is closed by its reader, such as `| head -1`: they clean up and print no error."""

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
    """Exit code and stderr of a Python program whose output has no reader."""
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


def test_a_program_without_a_reader_ends_when_it_prints() -> None:
    """If the output is flushed only at its end, it keeps its own exit code. With a reader, all output arrives."""
    assert into_closed_pipe("-c", PROGRAM.format(printed="'x' * 100_000")) == (141, "cleaned up\n")
    assert into_closed_pipe("-c", PROGRAM.format(printed="'x'"), PYTHONUNBUFFERED="1") == (141, "cleaned up\n")
    assert into_closed_pipe("-c", PROGRAM.format(printed="'x'")) == (3, "cleaned up\n")
    program = PROGRAM.format(printed="'é' * 100_000, end='.'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    read = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
    assert (read.returncode, read.stdout.decode()) == (3, "é" * 100_000 + ".")


def test_every_script_ends_without_a_reader() -> None:
    scripts = list((ROOT / "scripts").glob("[a-z]*.py"))
    begins = 'if __name__ == "__main__":\n    import _command  # noqa: F401\n'
    assert scripts and [path.name for path in scripts if begins not in path.read_text()] == []
