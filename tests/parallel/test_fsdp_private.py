"""Torch still has the private names of FSDP2 that we use."""

import re
from pathlib import Path

import torch

from megatron_fp4.parallel.fsdp_private import NAMES


def test_the_installed_torch_has_all_private_names() -> None:
    folder, missing = Path(torch.__file__).parent / "distributed/fsdp/_fully_shard", []
    for (file, class_name), names in NAMES.items():
        _, *rest = re.split(rf"^class {class_name}\b", (folder / file).read_text(), flags=re.MULTILINE)
        words = set(re.findall(r"\w+", "".join(rest).split("\nclass ")[0]))
        missing += [f"{file}: {class_name}.{name}" for name in names if name not in words]
    assert missing == []
