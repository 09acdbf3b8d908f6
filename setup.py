"""What a wheel holds besides the package: everything else of the build is in pyproject.toml.

The rooms of the checkout (data, models, ..., pretrain.py, configs) go to megatron_fp4/rooms, where no other package's
`data` or `models` can meet them; megatron_fp4/__main__.py says how they are found there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "megatron_fp4"
ROOT = Path(__file__).resolve().parent


class BuildPy(build_py):
    """Moves what is no part of the package, after it was built."""

    def run(self) -> None:
        """As setuptools does, then in an order of our own."""
        built = Path(self.build_lib)
        if not self.editable_mode:
            shutil.rmtree(built, ignore_errors=True)  # what an earlier build left would come along
        super().run()
        if self.editable_mode:
            return
        rooms = built / PACKAGE / "rooms"
        rooms.mkdir()
        for path in sorted(built.iterdir()):
            if path.name != PACKAGE:
                path.rename(rooms / path.name)
        shutil.copytree(ROOT / "configs", rooms / "configs")
        # Installed packages are asked which names they bring by this file.
        (Path(self.get_finalized_command("egg_info").egg_info) / "top_level.txt").write_text(f"{PACKAGE}\n")


modules = sorted(path.stem for path in ROOT.glob("*.py") if path.name != "setup.py")
setup(py_modules=modules, cmdclass={"build_py": BuildPy})
