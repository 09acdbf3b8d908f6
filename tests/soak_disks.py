"""Disks for tests/soak.py: one that loses power, one that is full, and checkpoints that rot."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

IMAGE_MB, FULL_DISK_MB = 48, 8


class NotPermittedError(Exception):
    """The machine does not let this user mount what is needed."""


def _command(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise NotPermittedError(f"{words[0]}: {' '.join(done.stderr.split())}")


class PowerDisk:
    """An ext4 file system in a file, mounted at `folder`/disk. A copy of the file is what a power cut would leave."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
            raise NotPermittedError("power cuts need root and mkfs.ext4")
        self.image, self.mount = folder / "image", folder / "disk"
        self.mount.mkdir(parents=True)
        with self.image.open("wb") as file:
            file.truncate(IMAGE_MB * 2**20)
        _command("mkfs.ext4", "-q", "-F", self.image)
        self._up()

    def _up(self) -> None:
        _command("mount", "-o", "loop", self.image, self.mount)
        device = subprocess.run(["findmnt", "-no", "SOURCE", self.mount], capture_output=True, text=True).stdout.strip()
        self._statistics = Path("/sys/block", Path(device).name, "stat")

    def _writes(self) -> list[str]:
        fields = self._statistics.read_text().split()
        return [fields[4], fields[6], fields[8]]  # requests done, sectors, and those on their way

    def copy(self) -> Path:
        """What is on the disk at one instant, which has to be one without writers: they are to be stopped meanwhile."""
        target = self.image.with_name("copy")
        for _ in range(200):
            before = self._writes()
            shutil.copyfile(self.image, target)
            if before == self._writes() and before[2] == "0":
                return target
            time.sleep(0.01)
        raise RuntimeError("the disk is never at rest")

    def lose_power(self, copy: Path) -> None:
        """Go on with `copy`; nobody may use the disk."""
        _command("umount", self.mount)
        copy.replace(self.image)
        self._up()

    def remove(self) -> None:
        """Unmount."""
        with contextlib.suppress(NotPermittedError):
            _command("umount", self.mount)


class FullDisk:
    """A small tmpfs, mounted at `folder`/disk, that can be filled."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0:
            raise NotPermittedError("a disk of its own to fill needs root")
        self.mount = folder / "disk"
        self.mount.mkdir(parents=True)
        _command("mount", "-t", "tmpfs", "-o", f"size={FULL_DISK_MB}m", "tmpfs", self.mount)
        self._filler = self.mount / "filler"

    def fill(self, free: int) -> None:
        """Leave about `free` bytes."""
        size = shutil.disk_usage(self.mount).free - free
        if size > 0:
            with contextlib.suppress(OSError), self._filler.open("ab") as file:
                os.posix_fallocate(file.fileno(), file.tell(), size)

    def empty(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)

    def remove(self) -> None:
        """Unmount."""
        with contextlib.suppress(NotPermittedError):
            _command("umount", self.mount)


def checkpoints(run_dir: Path) -> list[Path]:
    """Those that bear a checkpoint's name, the one that was saved last at the end."""
    found = [path for path in run_dir.glob("checkpoints/step_*") if re.fullmatch(r"step_\d{8}", path.name)]

    def index(folder: Path) -> int:
        try:
            return int(json.loads((folder / "manifest.json").read_text())["save_index"])
        except (OSError, ValueError, KeyError):
            return -1

    return sorted(found, key=index)


@dataclass(frozen=True)
class Damage:
    """What was done to a checkpoint. inode: of its folder, which may be renamed."""

    what: str
    folder: Path
    inode: int

    def is_there(self) -> bool:
        """Whether the damaged folder still has its name."""
        return self.folder.exists() and self.folder.stat().st_ino == self.inode


def damage_newest(run_dir: Path, draw: random.Random) -> Damage | None:
    """Damage the newest checkpoint in one of three ways, if there is one before it."""
    found = checkpoints(run_dir)
    if len(found) < 2:
        return None
    inode = found[-1].stat().st_ino
    file = draw.choice(sorted(path for path in found[-1].iterdir() if path.stat().st_size > 0))
    what = draw.choice(["a flipped bit", "a cut-off end", "a missing file"])
    if what == "a missing file":
        file.unlink()
    elif what == "a cut-off end":
        os.truncate(file, draw.randrange(file.stat().st_size))
    else:
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
    return Damage(what, found[-1], inode)
