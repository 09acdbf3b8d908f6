"""The names of FSDP2 that have no promise."""

import inspect
from importlib import import_module

import pytest

from megatron_fp4.parallel.fsdp_private import NAMES


@pytest.mark.parametrize(("file", "class_name"), NAMES)
def test_the_installed_torch_has_them_all(file: str, class_name: str) -> None:
    module = import_module(f"torch.distributed.fsdp._fully_shard.{file.removesuffix('.py')}")
    source = inspect.getsource(getattr(module, class_name))
    assert [name for name in NAMES[file, class_name] if name not in source] == []
