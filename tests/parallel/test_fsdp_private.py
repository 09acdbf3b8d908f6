"""The names of FSDP2 that have no promise: which of them a torch lacks.

Of another torch than the installed one, by its files: python -m tests.parallel.test_fsdp_private FOLDER, which has
torch/distributed/fsdp/_fully_shard (a wheel, unpacked).
"""

import ast
import sys
from pathlib import Path

import torch

from megatron_fp4.parallel.fsdp_private import NAMES

FOLDER = "distributed/fsdp/_fully_shard"


def missing(folder: Path) -> list[str]:
    """`file: class.name` of each name that a class of FSDP2, whose files are in `folder`, neither defines nor sets."""
    lacking = []
    for (file, class_name), names in NAMES.items():
        tree = ast.parse((folder / file).read_text())
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == class_name]
        has = {
            getattr(node, "name", None) or getattr(node, "attr", None) or getattr(node, "id", None) or node.value
            for of_class in found
            for node in ast.walk(of_class)
            if isinstance(node, ast.FunctionDef | ast.Attribute | ast.Name)
            or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        }
        lacking += [f"{file}: {class_name}.{name}" for name in names if name not in has]
    return lacking


def test_the_installed_torch_has_them_all() -> None:
    assert missing(Path(torch.__file__).parent / FOLDER) == []


def test_what_a_torch_lacks_is_named(tmp_path: Path) -> None:
    for path in (Path(torch.__file__).parent / FOLDER).glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text().replace("_init_extensions", "_set_up_extensions"))
    assert missing(tmp_path) == ["_fsdp_param.py: FSDPParam._init_extensions"]


if __name__ == "__main__":
    print("\n".join(missing(Path(sys.argv[1]) / "torch" / FOLDER)) or "nothing is missing")
