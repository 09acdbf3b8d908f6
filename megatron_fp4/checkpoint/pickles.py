"""Reads pickles that others may have written: nothing that a pickle names is imported, called or given attributes.

Python's unpickler needs two or three bytes to allocate gigabytes (an index of the memo, the length of a string), and a
few hundred to compute for years (the hash of a tuple of the same tuple of ...). This reader is the unpickler that
Python has in Python, with the operations that torch writes in protocols 2 to 5. It takes memory in proportion to the
content, and hashes no containers.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Container
from typing import Any, ClassVar

import torch

_HASHED = (str, int, float, bool, bytes, type(None), torch.dtype)
# Of these, Python's own code serves.
_OPERATIONS = """
    PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID NONE
    NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES
    BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT EMPTY_LIST APPEND APPENDS ADDITEMS
"""


class StandIn:
    """An object or a global of a pickle. name: of its class, `module.name`. arguments, state: what its class would get
    when the object is made, and afterwards. Its content as a list, set or dictionary is not kept."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: Any = ()) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def __call__(self, *arguments: Any) -> StandIn:
        return StandIn(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Drops the item of a list or set."""

    add = append


def read_pickle(content: bytes, known: Container[str] | None = None) -> Any:
    """The object of a pickle: plain values, torch's dtypes, and a StandIn for everything else. Keys are no containers.

    known: the globals that it may name; None: any. Raises ValueError for another one; for other content anything.
    """
    return _Reader(content, known).load()


class _Reader(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPERATIONS.split())
    }

    def __init__(self, content: bytes, known: Container[str] | None) -> None:
        super().__init__(io.BytesIO(content))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        """The dtype or the StandIn of a global."""
        full = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if self._known is not None and full not in self._known:
            raise ValueError(f"names {full}, which no checkpoint holds; nothing of it was run")
        return StandIn(full)

    def persistent_load(self, pid: Any) -> None:
        """The values of a tensor, which are not read."""

    def _new_object(self) -> None:
        arguments = self.stack.pop()
        self.append(StandIn(self.stack.pop().name, arguments))

    def _new_object_by_keywords(self) -> None:
        self.stack.pop()
        self._new_object()

    def _empty_set(self) -> None:
        self.append(StandIn("builtins.set"))

    def _frozenset(self) -> None:
        self.pop_mark()
        self.append(StandIn("builtins.frozenset"))

    def _set_item(self) -> None:
        value = self.stack.pop()
        self._put(self.stack.pop(), value)

    def _set_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._put(key, value)

    def _put(self, key: Any, value: Any) -> None:
        if type(target := self.stack[-1]) is dict:
            target[key if isinstance(key, _HASHED) or type(key) is StandIn else StandIn("key")] = value

    dispatch |= {
        pickle.NEWOBJ[0]: _new_object,
        pickle.NEWOBJ_EX[0]: _new_object_by_keywords,
        pickle.EMPTY_SET[0]: _empty_set,
        pickle.FROZENSET[0]: _frozenset,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }
