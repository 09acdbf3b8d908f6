"""The Dockerfile's lines, run without a Docker engine: in a chroot, as root.

    debootstrap --variant=minbase --include=python3-venv,procps,ca-certificates bookworm /tmp/root
    python -m tests.dockerfile_lines /tmp/root

Done as Docker does it: ENV, SHELL, WORKDIR, COPY . . (what git tracks), RUN, USER and the command of HEALTHCHECK. A RUN
whose comment says "Needs NVIDIA's image" is not run. For what that image has and Debian has not stands in a venv with
torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDS_IMAGE = "eeds NVIDIA's image"
VENV = "/opt/image"
PREPARED = f"python3 -m venv {VENV} && {VENV}/bin/pip install 'setuptools>=77' wheel numpy 'torch>=2.11,<2.14'"


@dataclass(frozen=True)
class Line:
    """An instruction, with its continuation lines as one. needs_image: says the comment above it."""

    name: str
    text: str
    needs_image: bool


@dataclass
class State:
    """Of the image that is being built."""

    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    folder: str = "/"
    user: str = "0:0"
    environment: dict[str, str] = field(default_factory=dict)


def lines(path: Path) -> list[Line]:
    """The instructions of a Dockerfile."""
    found, comment, text = [], "", ""
    for row in path.read_text().splitlines():
        if row.startswith("#") or not row.strip():
            comment = f"{comment} {row}" if row.strip() else ""
            continue
        text += row.removesuffix("\\")
        if row.endswith("\\"):
            continue
        name, _, rest = text.strip().partition(" ")
        found.append(Line(name, rest.strip(), NEEDS_IMAGE in comment))
        comment = text = ""
    return found


def run(root: Path, state: State, command: list[str]) -> int:
    """A command in the chroot; returns its exit code."""
    user, group = state.user.split(":")
    words = ["chroot", f"--userspec={user}:{group}", str(root), "/usr/bin/env", "--chdir", state.folder, *command]
    return subprocess.run(words, env=state.environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="a folder that debootstrap made")
    root: Path = parser.parse_args().root.resolve()
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    state = State(environment={**pip, "PATH": f"{VENV}/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"})
    if not (root / VENV[1:]).exists() and run(root, state, ["bash", "-c", PREPARED]):
        return 1
    for line in lines(ROOT / "Dockerfile"):
        print(f"--- {line.name} {line.text}", flush=True)
        if line.name == "SHELL":
            state.shell = json.loads(line.text)
        elif line.name == "ENV":
            state.environment |= dict(word.split("=", 1) for word in shlex.split(line.text))
        elif line.name == "WORKDIR":
            state.folder = line.text
        elif line.name == "USER":
            state.user = line.text
        elif line.name == "COPY":
            owner, _, _ = line.text.removeprefix("--chown=").partition(" ")
            target = f"{root}{state.folder}"
            copy = f"git ls-files -z | tar --create --null --files-from - | tar --extract --directory {target}"
            subprocess.run(["bash", "-c", copy], cwd=ROOT, check=True)
            subprocess.run(["chown", "-R", owner, target], check=True)
        elif line.name in ("RUN", "HEALTHCHECK"):
            if line.needs_image:
                print("not run: needs NVIDIA's image")
                continue
            command = [*state.shell, line.text]
            if line.name == "HEALTHCHECK":
                command = json.loads(line.text.partition("CMD ")[2])
            if code := run(root, state, command):
                print(f"{line.name} failed with exit code {code}", file=sys.stderr)
                return 1
        elif line.name not in ("ARG", "FROM"):
            print(f"{line.name} is no instruction known here", file=sys.stderr)
            return 1
    print("every line ran but those that need NVIDIA's image")
    return 0


if __name__ == "__main__":
    sys.exit(main())
