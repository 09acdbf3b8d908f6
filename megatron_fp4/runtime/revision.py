"""Which version of the code runs, for runs, checkpoints, exports and reports."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

from megatron_fp4 import __version__

_ROOT = Path(__file__).resolve().parents[2]


@cache
def revision() -> str:
    """The commit of the checkout, such as `0123456789ab`. With uncommitted changes, `+` and eight digits of their hash
    follow. Without git, `version 0.2.0`."""
    if not (_ROOT / ".git").exists():  # a parent folder may be another repository
        return f"version {__version__}"
    try:
        commit, changes = _git("rev-parse", "--short=12", "HEAD").decode().strip(), _git("diff", "HEAD")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return f"version {__version__}"
    return f"{commit}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def _git(*arguments: str) -> bytes:
    # Git refuses a checkout of another user, as in a container, unless it is named safe.
    command = ["git", "-c", f"safe.directory={_ROOT}", *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, check=True, timeout=10).stdout
