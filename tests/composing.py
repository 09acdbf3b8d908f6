"""Configurations composed quickly: four times as fast as Hydra does it once it has read the files."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from megatron_fp4.config import compose
from megatron_fp4.config.schema import ConfigError


@contextmanager
def quick_composing(folder: Path | None = None, known: dict[Any, Any] | None = None) -> Iterator[None]:
    """Hydra reads the files of one choice of groups once, and then only sets values, as it does itself.

    folder: the only one whose files are remembered, which nobody changes; None for every one. known: what was read
    before, and is from now on.
    """
    real = compose._compose
    known = {} if known is None else known

    def quick(name: str, overrides: list[str], directory: Path) -> Any:
        files = [one for one in overrides if "." not in one.partition("=")[0]]
        key = name, tuple(files), directory
        if key not in known:
            known[key] = real(name, files, directory)
        values = OverridesParser.create().parse_overrides([one for one in overrides if one not in files])
        if any(value.is_sweep_override() for value in values):
            return real(name, overrides, directory)
        found = copy.deepcopy(known[key])
        ConfigLoaderImpl._apply_overrides_to_config(values, found)
        return found

    def cached(name: str, overrides: list[str], directory: Path) -> Any:
        if folder is not None and directory != folder:
            return real(name, overrides, directory)
        try:
            return quick(name, overrides, directory)
        except (HydraException, ConfigError):
            return real(name, overrides, directory)  # which says it in one line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_compose", cached)
        yield
