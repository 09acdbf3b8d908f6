"""Which commands a piece of shell would start: bash itself expands variables, loops and quotes, and starts nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Every command that is none of bash's own is written down with its arguments instead of being started, but for Python's
# one-liners, whose output other commands are made of. Bash's own that would do something are covered by functions.
_RECORDER = r"""
command_not_found_handle() {
    if [ "$1 $2" = "python -c" ] && [ -n "$IN_SUBSTITUTION" ]; then "$PYTHON" "${@:2}"; return; fi
    printf '%s\0' "$#" "${WORLD_SIZE-}" "$@" >&3
}
cd() { :; }
source() { :; }
kill() { command_not_found_handle kill "$@"; }
"""


@dataclass(frozen=True)
class Command:
    """A command as the shell would start it. world_size: of its environment, 0 if it has none."""

    arguments: tuple[str, ...]
    world_size: int = 0

    def __str__(self) -> str:
        return " ".join(self.arguments)


def commands_of(script: str, name: str) -> list[Command]:
    """The commands that bash would start for `script`, in order. name: for what is wrong with it.

    Raises ValueError for a script that bash cannot parse.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        # A path as a command's name is looked up by nobody: a function of that name stands in.
        paths = set(re.findall(r"(?m)(?:^[ \t]*|[|;&(]\s*|=\S+ )((?:\.{0,2}/)?(?:[\w.$~-]+/)+[\w.-]+)(?=\s|$)", script))
        functions = "".join(f'function {path} {{ command_not_found_handle {path} "$@"; }}\n' for path in paths)
        substituted = re.sub(r"\$\((?!\()", "$(IN_SUBSTITUTION=1; ", script)
        done = subprocess.run(
            [shutil.which("bash") or "bash", "--norc", "-c", f"exec 3>{log}\n{_RECORDER}{functions}{substituted}\n"],
            cwd=folder,
            env={"PATH": "/nowhere", "HOME": os.environ.get("HOME", "/"), "PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if "syntax error" in done.stderr or "unexpected EOF" in done.stderr or "No such file" in done.stderr:
            raise ValueError(f"{name}: {done.stderr.strip()}")
        fields = log.read_text().split("\0")
    found, i = [], 0
    while i + 1 < len(fields):
        count, world_size = int(fields[i]), fields[i + 1]
        arguments = tuple(fields[i + 2 : i + 2 + count])
        if set(arguments) != {"..."}:
            found.append(Command(arguments, int(world_size or 0)))
        i += 2 + count
    return found
