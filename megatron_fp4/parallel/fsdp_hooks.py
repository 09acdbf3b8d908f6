"""Forward and backward passes without FSDP2's hooks, where they would have nothing to do.

FSDP2 gathers parameters before a module runs and adds gradients up after its backward pass, by hooks that take a tenth
of a second of the host's time for a small model's micro-batch. In a micro-batch that is neither the first of a step nor
the last, with parameters that stay gathered, there is nothing to gather, to free or to add up over ranks: gradients
collect in the gathered parameters by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class FSDPHooks:
    """The hooks with which FSDP2 gathers and reduces. A module does not know whose a hook is, so what is new behind
    each `fully_shard` is written down."""

    def __init__(self) -> None:
        self._found: list[tuple[nn.Module, dict[str, list[int]]]] = []

    @contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """A context in which `fully_shard` and what goes with it put their hooks on `module`."""
        before = {name: set(getattr(module, name)) for name in _KINDS}
        yield
        new = {name: [key for key in getattr(module, name) if key not in before[name]] for name in _KINDS}
        self._found.append((module, new))

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside, modules run without them. Others' hooks stay; none may come or go."""
        kept = []
        for module, found in self._found:
            for name, keys in found.items():
                hooks = getattr(module, name)
                kept.append((hooks, hooks.copy()))
                for key in keys:
                    del hooks[key]
        try:
            yield
        finally:
            for hooks, as_before in reversed(kept):
                hooks.clear()
                hooks.update(as_before)


_KINDS = ("_forward_pre_hooks", "_forward_hooks")
