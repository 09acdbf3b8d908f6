"""Every command whose output cannot be written ends with one line that has the path and the remedy."""

import errno
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.runtime.errors import error_line
from tests.programs import ROOT


def test_the_line_has_the_path_and_the_remedy() -> None:
    for number, remedy in (
        (errno.ENOSPC, "make room, or name another place"),
        (errno.EROFS, "change its permissions, or name another place"),
        (errno.ENOTDIR, "a file is where a folder must be; name another place"),
        (errno.EISDIR, "name a file, not a folder"),
        (errno.ENOENT, "correct the path"),
    ):
        reason = os.strerror(number)
        assert error_line(OSError(number, reason, "/d/out")).startswith(f"/d/out: {reason}; {remedy}")
        # The path is the target of a rename; if the error has no path, it is the command's output.
        assert error_line(OSError(number, reason, "/d/a", None, "/d/out")).startswith(f"/d/out: {reason}; ")
        assert error_line(OSError(number, reason), Path("/d/out")).startswith(f"/d/out: {reason}; {remedy}")
    assert error_line(ValueError("a\n  b")) == "a b" == error_line(OSError("a b"), "/d/out")


# (module, function that fails, arguments)
COMMANDS = [
    ("scripts.convert", "open_checkpoint", ["export-hf", "c", "{out}"]),
    ("scripts.convert", "import_hf", ["import-hf", "m", "{out}"]),
    ("scripts.evaluate", "models_of", ["m", "--json", "{out}"]),
    ("scripts.generate", "run", ["c", "--prompt", "a"]),
    ("scripts.analyze_precision", "analyze", ["c", "--output", "{out}"]),
    ("scripts.compare", "compare_runs", ["runs", "a", "b", "--output", "{out}.png"]),
    ("scripts.report", "write_report", ["a", "--output", "{out}"]),
    ("scripts.prepare_data", "_prepare", ["--output", "{out}", "--tokenizer", "t"]),
    ("scripts.prepare_data", "prefixes", ["merge", "--inputs", "a", "--output", "{out}"]),
]


@pytest.mark.parametrize(("name", "function", "arguments"), COMMANDS)
def test_a_full_disk_gives_one_line(
    name: str, function: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The error of a write has no path."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module, out = importlib.import_module(name), tmp_path / "out"
    given = [argument.format(out=out) for argument in arguments]
    monkeypatch.setattr(module, function, full)
    with pytest.raises(SystemExit) as ended:
        sys.exit(module.main(given))
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.count("\n") == 1, printed
    where = "its output" if "generate" in name else str(out)
    assert where in printed and ": No space left on device; make room, or name another place" in printed


@pytest.mark.parametrize("program", ["print('x' * 100_000)", "print('x')"])
def test_standard_output_on_a_full_disk(program: str) -> None:
    begin = "from megatron_fp4.runtime.closed_pipe import end_without_reader\nend_without_reader()\n"
    printed = "f'{error.filename}: {error.strerror}'"
    body = f"try:\n    {program}\nexcept OSError as error:\n    raise SystemExit({printed})"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", begin + body], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert done.returncode == 1 and done.stderr.startswith("standard output: No space left on device")
    assert done.stderr.count("\n") == 1
