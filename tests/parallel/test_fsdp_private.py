"""Torch still has the private names of FSDP2 that we use.

To check another version of torch: python -m tests.parallel.test_fsdp_private FOLDER, where FOLDER is its unpacked
wheel, with torch/distributed/fsdp/_fully_shard.
"""

import re
import sys
from pathlib import Path

import torch

from megatron_fp4.parallel.fsdp_private import NAMES

FOLDER = "distributed/fsdp/_fully_shard"


def missing(folder: Path) -> list[str]:
    """`file: class.name` of each name in `NAMES` that does not occur in its class. folder: has the files of FSDP2."""
    missing_names = []
    for (file, class_name), names in NAMES.items():
        _, *rest = re.split(rf"^class {class_name}\b", (folder / file).read_text(), flags=re.MULTILINE)
        words = set(re.findall(r"\w+", "".join(rest).split("\nclass ")[0]))
        missing_names += [f"{file}: {class_name}.{name}" for name in names if name not in words]
    return missing_names


def test_the_installed_torch_has_all_private_names() -> None:
    assert missing(Path(torch.__file__).parent / FOLDER) == []


if __name__ == "__main__":
    print("\n".join(missing(Path(sys.argv[1]) / "torch" / FOLDER)) or "nothing is missing")
