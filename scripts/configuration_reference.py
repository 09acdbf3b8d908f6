"""Write docs/configuration.md: every key of a configuration with its type, default, range and explanation.

Everything comes from the dataclasses of megatron_fp4/config: types, ranges, defaults and explanations from their
fields, the text of a section from the class's docstring. If the default run (configs/config.yaml and the options that
it chooses) sets another value, the page shows it beside the default.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _command  # noqa: F401

import ast
import contextlib
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from megatron_fp4.config.compose import compose_config, group_options
from megatron_fp4.config.errors import shown
from megatron_fp4.config.help import default_options, option_summary
from megatron_fp4.config.schema import ADDED, Config
from megatron_fp4.config.types import MOST

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
CONFIGS = ROOT / "configs"
_NAMES = {int: "integer", float: "number", str: "text", bool: "boolean", type(None): "null"}

INTRODUCTION = f"""\
# Configuration

<!-- Written by scripts/configuration_reference.py from megatron_fp4/config; a test compares. Change it there. -->

All keys of a run's configuration. On the command line `key=value` sets a key (`train.steps=1000`) and `group=option`
selects a file of `configs/` (`model=hybrid_60m`); `python pretrain.py --help` lists both with the values of the default
run. An unknown key, a value out of range or an impossible combination ends the command with one line. Write lists and
mappings as in `'data.sources={{web: /data/web}}'`; in files of `configs/` they are YAML. Numbers may be written as 10k,
1.5M or 1e3. Integers are at most {MOST:,} unless another limit is given.

*Default* is the value of a key that nothing sets. An arrow leads to the value in the default run, which comes from
`configs/config.yaml` and the options marked * below.
"""


def page() -> str:
    """The page's text."""
    default = compose_config([], CONFIGS)
    lines = [INTRODUCTION, "## Groups\n", "| option | |", "|---|---|"]
    chosen = default_options(CONFIGS)
    own = _untracked()
    for group, names in group_options(CONFIGS).items():
        for name in (name for name in names if f"configs/{group}/{name}.yaml" not in own):
            mark = " *" if chosen.get(group) == name else ""
            summary = option_summary(CONFIGS / group / f"{name}.yaml", width=None)
            lines.append(f"| `{group}={name}`{mark} | {_escaped(summary)} |")
    known: dict[type, str] = {}
    for section in fields(Config):
        if section.name not in ADDED:
            value = getattr(default, section.name)
            lines += _section(section.name, type(value), value, known)
    return "\n".join(lines) + "\n"


def _untracked() -> list[str]:
    """The files below configs/ that git does not know: a user's own. None without git."""
    command = ["git", "ls-files", "--others", "configs"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    return []


def _explanations(cls: type) -> dict[str, str]:
    """The explanation of each key of a dataclass: the string below it, or below the last of several keys."""
    explanations: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if is_dataclass(base)]):
        keys: list[str] = []
        for node in ast.parse(inspect.getsource(base)).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign):
                keys.append(ast.unparse(node.target))
            elif keys and isinstance(node, ast.Expr):
                explanations |= dict.fromkeys(keys, " ".join(ast.literal_eval(node.value).split()))
                keys = []
    return explanations


def _section(path: str, cls: type, value: object, known: dict[type, str]) -> Iterator[str]:
    """The tables of the keys of `cls` and of the dataclasses in its fields. value: the instance in the default run, or
    None. known: the classes that have a table already, with its path."""
    yield f"\n## {path}\n" if "." not in path else f"\n### {path}\n"
    base = next((one for one in cls.__mro__ if one in known), None)
    there = {field.name for field in fields(base)} if base else set()  # type: ignore[arg-type]
    if base is not None:
        usual = {field.name: _own_default(field) for field in fields(base)} if value is not None else {}  # type: ignore[arg-type]
        others = [f"`{key}` {_shown(of)}" for key in usual if (of := getattr(value, key)) != usual[key]]
        has = f"; the default run has {', '.join(others)}" if others else ""
        anchor = re.sub(r"[^\w\-]", "", known[base].lower())
        more = "" if base is cls else ", and those below"
        yield f"Keys as those of [{known[base]}](#{anchor}){more}{has}."
        if base is cls:
            return
        yield ""
    known[cls] = path
    explanations = _explanations(cls)
    rows: list[tuple[list[tuple[str, str, str]], str]] = []  # keys with their types and defaults; their explanation
    inner: list[tuple[str, Any, object]] = []
    hints = get_type_hints(cls, include_extras=True)
    for field in (field for field in fields(cls) if field.name not in there):  # type: ignore[arg-type]
        hint: Any = hints[field.name]
        name = f"{path}.{field.name}"
        current = MISSING if value is None else getattr(value, field.name)
        if is_dataclass(hint):
            inner.append((name, hint, None if current is MISSING else current))
            continue
        inner += [(f"{name}[...]", one, None) for one in get_args(hint) if isinstance(one, type) and is_dataclass(one)]
        own = _own_default(field)
        default = _shown(own) if current in (MISSING, own) else f"{_shown(own)} → {_shown(current)}"
        explained = explanations.get(field.name, "")
        if not rows or rows[-1][1] != explained:
            rows.append(([], explained))
        rows[-1][0].append((f"`{field.name}`", _type_name(hint), default))
    yield f"{' '.join(inspect.cleandoc(cls.__doc__ or '').split())}\n"
    if rows:
        yield from ("| key | type | default | |", "|---|---|---|---|")
    for together, explained in rows:
        cells = ("; ".join(dict.fromkeys(column)) for column in zip(*together, strict=True))
        yield "| " + " | ".join(map(_escaped, (*cells, explained))) + " |"
    for name, nested_cls, current in inner:
        yield from _section(name, nested_cls, current, known)


def _type_name(hint: Any) -> str:
    """A type and its range as text, such as `integer ≥ 1`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [part for one in arguments[1:] for part in (one, *getattr(one, "metadata", ()))]
        lower = [f"> {of.gt:,}" if isinstance(of, Gt) else f"≥ {of.ge:,}" for of in limits if isinstance(of, (Gt, Ge))]
        upper = [f"< {of.lt:,}" if isinstance(of, Lt) else f"≤ {of.le:,}" for of in limits if isinstance(of, (Lt, Le))]
        upper = [limit for limit in upper if limit != f"≤ {MOST:,}"]  # the introduction has it
        return " ".join([_type_name(arguments[0]), " and ".join([*lower, *upper])]).strip()
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of names to {_type_name(arguments[1])}"
    return "mapping (below)" if is_dataclass(hint) else _NAMES[hint]


def _own_default(field: Field[Any]) -> object:
    return field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc, operator]


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} of them" if value and is_dataclass(value[0]) else str(value)
    if isinstance(value, dict) and value:
        return "{...}"
    return f"{value:g}" if isinstance(value, float) else shown(value) or '""'


def _escaped(text: str) -> str:
    text = text.replace("|", "\\|")
    return re.sub(r"(?<!`)<(?=[^ \d])", "&lt;", text)  # otherwise Markdown reads a tag, except in code


if __name__ == "__main__":
    if sys.argv[1:] or not PAGE.parent.is_dir():
        sys.exit(f"usage: python scripts/configuration_reference.py, in a checkout, writes {PAGE}")
    PAGE.write_text(page())
