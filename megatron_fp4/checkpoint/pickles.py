"""Reads pickles that others may have written: nothing that a pickle names is imported, called or given attributes.

Python's unpickler needs two or three bytes to allocate gigabytes (an index of the memo, the length of a string), and a
few hundred to compute for years (the hash of a tuple of the same tuple of ...). This reader knows the operations that
torch writes in protocols 2 to 5, takes memory in proportion to the content, and hashes no containers.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import Any

import torch

_HASHED = (str, int, float, bool, bytes, type(None), torch.dtype)


class StandIn:
    """An object or a global of a pickle. name: of its class, `module.name`. arguments, state: what its class would get
    when the object is made, and afterwards. Its content as a list, set or dictionary is not kept."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: Any = ()) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None


def read_pickle(content: bytes, known: Container[str] | None = None) -> Any:
    """The object of a pickle: plain values, torch's dtypes, and a StandIn for everything else. Keys are no containers.

    known: the globals that it may name; None: any. Raises ValueError for another one; for other content anything.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at, push, pop = 0, stack.append, stack.pop

    def number(size: int) -> int:
        """The unsigned integer of the next `size` bytes."""
        nonlocal at
        at += size
        return int.from_bytes(content[at - size : at], "little")

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        if at > len(content):
            raise ValueError("it is cut short")
        return content[at - size : at]

    def line() -> str:
        nonlocal at
        start, at = at, content.index(b"\n", at) + 1
        return content[start : at - 1].decode()

    def since_mark() -> list[Any]:
        start = marks.pop()
        values = stack[start:]
        del stack[start:]
        return values

    def set_items(keys_and_values: list[Any]) -> None:
        if type(target := stack[-1]) is dict:
            for key, value in zip(keys_and_values[::2], keys_and_values[1::2], strict=True):
                target[key if isinstance(key, _HASHED) or type(key) is StandIn else StandIn("key")] = value

    def named(module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if known is not None and full not in known:
            raise ValueError(f"names {full}, which no checkpoint holds; nothing of it was run")
        return StandIn(full)

    while True:
        operation = content[at]  # the most frequent ones first
        at += 1
        if operation == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif operation == 0x6A:  # LONG_BINGET
            push(memo[number(4)])
        elif operation == 0x68:  # BINGET
            push(memo[number(1)])
        elif operation == 0x4D:  # BININT2
            push(number(2))
        elif operation == 0x4B:  # BININT1
            push(number(1))
        elif operation == 0x28:  # MARK
            marks.append(len(stack))
        elif operation == 0x75:  # SETITEMS
            set_items(since_mark())
        elif operation == 0x29:  # EMPTY_TUPLE
            push(())
        elif operation in (0x81, 0x52, 0x92):  # NEWOBJ, REDUCE, NEWOBJ_EX
            if operation == 0x92:
                pop()  # arguments by keyword
            arguments = pop()
            push(StandIn(pop().name, arguments))
        elif operation == 0x62:  # BUILD
            stack[-1].state = pop()
        elif operation in (0x85, 0x86, 0x87):  # TUPLE1 to TUPLE3
            marks.append(len(stack) - (operation - 0x84))
            push(tuple(since_mark()))
        elif operation == 0x7D:  # EMPTY_DICT
            push({})
        elif operation == 0x8C:  # SHORT_BINUNICODE
            push(take(number(1)).decode(errors="surrogatepass"))
        elif operation == 0x4E:  # NONE
            push(None)
        elif operation in (0x88, 0x89):  # NEWTRUE, NEWFALSE
            push(operation == 0x88)
        elif operation == 0x5D:  # EMPTY_LIST
            push([])
        elif operation in (0x61, 0x65):  # APPEND, APPENDS
            more = [pop()] if operation == 0x61 else since_mark()
            if type(stack[-1]) is list:
                stack[-1].extend(more)
        elif operation == 0x74:  # TUPLE
            push(tuple(since_mark()))
        elif operation == 0x73:  # SETITEM
            value = pop()
            set_items([pop(), value])
        elif operation in (0x71, 0x72):  # BINPUT, LONG_BINPUT
            memo[number(1 if operation == 0x71 else 4)] = stack[-1]
        elif operation in (0x58, 0x8D):  # BINUNICODE, BINUNICODE8
            push(take(number(4 if operation == 0x58 else 8)).decode(errors="surrogatepass"))
        elif operation in (0x43, 0x42, 0x8E, 0x96):  # SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8
            push(take(number({0x43: 1, 0x42: 4}.get(operation, 8))))
        elif operation == 0x4A:  # BININT
            push(int.from_bytes(take(4), "little", signed=True))
        elif operation in (0x8A, 0x8B):  # LONG1, LONG4
            push(int.from_bytes(take(number(1 if operation == 0x8A else 4)), "little", signed=True))
        elif operation == 0x47:  # BINFLOAT
            push(struct.unpack(">d", take(8))[0])
        elif operation == 0x63:  # GLOBAL
            push(named(line(), line()))
        elif operation == 0x93:  # STACK_GLOBAL
            name = pop()
            push(named(pop(), name))
        elif operation == 0x51:  # BINPERSID: the values of a tensor, which are not read
            stack[-1] = None
        elif operation == 0x8F:  # EMPTY_SET
            push(StandIn("builtins.set"))
        elif operation == 0x90:  # ADDITEMS
            since_mark()
        elif operation == 0x91:  # FROZENSET
            since_mark()
            push(StandIn("builtins.frozenset"))
        elif operation in (0x80, 0x95):  # PROTO, FRAME
            at += 1 if operation == 0x80 else 8
        elif operation == 0x2E:  # STOP
            return pop()
        else:
            raise ValueError(f"it has the operation {operation:#x}, which torch does not write")
