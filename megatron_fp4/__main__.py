"""The command `megatron-fp4`, also `python -m megatron_fp4`: training, and the scripts by their names, from any folder.

    megatron-fp4 model=tiny train.steps=100            as pretrain.py in the checkout
    torchrun --nproc-per-node 8 -m megatron_fp4 ...    on several GPUs
    megatron-fp4 prepare_data --help                   as scripts/prepare_data.py

The rooms besides this package (data, models, ...) have names that others use too. So a wheel keeps them in a folder of
this package's own (setup.py), not where any `import data` would find them, and this command puts that folder first on
the path of its process and of those it starts: a `data` in the current folder, on PYTHONPATH or installed by somebody
else comes after it. From a checkout it does the same with the checkout.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOMS = ("data", "models", "exchange", "inference", "analysis")


def root() -> Path:
    """The folder with pretrain.py, configs/ and the other rooms: the wheel's, or that of the checkout."""
    inside = PACKAGE / "rooms"
    return inside if inside.is_dir() else PACKAGE.parent


def commands() -> list[str]:
    """What may come first instead of an override: the names of the scripts."""
    return sorted(path.stem for path in (root() / "scripts").glob("[a-z]*.py"))


def program(arguments: list[str]) -> tuple[Path, list[str]]:
    """The file that `arguments` ask for, and what is left of them. Raises ValueError."""
    first, *rest = arguments or ["train"]
    if first == "train":
        return root() / "pretrain.py", rest
    if first.startswith("-") or "=" in first or first.startswith("~"):
        return root() / "pretrain.py", arguments
    name = first.replace("-", "_")
    if name not in commands():
        raise ValueError(f"{first} is no override (key=value) and no command; commands: train {' '.join(commands())}")
    return root() / "scripts" / f"{name}.py", rest


def put_first(folder: Path) -> None:
    """Make `folder` the first that this process and its children import from.

    Raises ValueError if a room's name is taken already.
    """
    folder_name = str(folder)
    sys.path[:] = [folder_name, *(path for path in sys.path if path != folder_name)]
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != folder_name]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder_name, *others])
    for name in ROOMS:
        there = sys.modules.get(name)
        origin: str | None = getattr(there or PathFinder.find_spec(name), "__file__" if there else "origin", None)
        if origin is None or folder not in Path(origin).resolve().parents:
            where = f"that of {origin}" if origin else "missing"
            raise ValueError(f"the module {name} is {where}, not {folder}/{name}; remove what imports it at start")


def main() -> None:
    """Run the program that the command line asks for; does not return."""
    try:
        path, arguments = program(sys.argv[1:])
        put_first(root())
    except ValueError as error:
        print(f"megatron-fp4: {error}", file=sys.stderr)
        sys.exit(2)
    sys.argv = ["megatron-fp4" if path.name == "pretrain.py" else f"megatron-fp4 {path.stem}", *arguments]
    sys.path.insert(0, str(path.parent))  # as `python path` does
    runpy.run_path(str(path), run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    main()
