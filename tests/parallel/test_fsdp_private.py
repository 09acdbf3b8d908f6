"""The names of FSDP2 that have no promise: which of them a torch lacks.

Of another torch than the installed one, by its files: python -m tests.parallel.test_fsdp_private FOLDER, which has
torch/distributed/fsdp/_fully_shard (a wheel, unpacked).
"""

import re
import sys
from pathlib import Path

import torch

from megatron_fp4.parallel.fsdp_private import NAMES

FOLDER = "distributed/fsdp/_fully_shard"


def missing(folder: Path) -> list[str]:
    """`file: class.name` of each name that does not occur in its class of FSDP2, whose files are in `folder`."""
    lacking = []
    for (file, class_name), names in NAMES.items():
        _, *rest = re.split(rf"^class {class_name}\b", (folder / file).read_text(), flags=re.MULTILINE)
        words = set(re.findall(r"\w+", "".join(rest).split("\nclass ")[0]))
        lacking += [f"{file}: {class_name}.{name}" for name in names if name not in words]
    return lacking


def test_the_installed_torch_has_them_all() -> None:
    assert missing(Path(torch.__file__).parent / FOLDER) == []


if __name__ == "__main__":
    print("\n".join(missing(Path(sys.argv[1]) / "torch" / FOLDER)) or "nothing is missing")
