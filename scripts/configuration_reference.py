"""Write docs/configuration.md: every key of a configuration with its type, default, range and explanation.

    python scripts/configuration_reference.py            writes the page
    python scripts/configuration_reference.py --check    exit code 1 if the page is not what it would write

Everything is read from the dataclasses of megatron_fp4/config: types, ranges and defaults from their fields,
explanations from their docstrings, where `key: text` or `key, other: text` explains keys and what comes first the
section. What the default run sets otherwise (configs/config.yaml and the groups that it chooses) stands beside the
default.
"""

from __future__ import annotations

import argparse
import inspect
import re
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
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}

INTRODUCTION = f"""\
# Configuration

<!-- Written by scripts/configuration_reference.py from megatron_fp4/config; a test compares. Change it there. -->

Every key that a run has. On the command line `key=value` sets one (`train.steps=1000`), `group=option` takes a file
of `configs/` (`model=hybrid_60m`), and `python pretrain.py --help` lists both with the values of the default run. A key
that does not exist, a value out of its range and combinations that cannot run are refused in one line, before anything
is built. Lists and mappings are written as in `'data.sources={{web: /data/web}}'`; in files of `configs/` they are
YAML. Numbers may be written as 10k, 1.5M or 1e3. Integers without another upper limit end at {MOST:,}.

*Default* is what holds where nothing else says otherwise. What the default run has instead, by `configs/config.yaml`
and the options marked * below, stands behind an arrow.
"""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args(arguments)
    if not PAGE.parent.is_dir():
        print(f"configuration_reference.py: {PAGE.parent} is not there; run it in a checkout", file=sys.stderr)
        return 2
    written = page()
    if not options.check:
        PAGE.write_text(written)
        return 0
    if PAGE.read_text() == written:
        return 0
    print("docs/configuration.md is not current; run python scripts/configuration_reference.py", file=sys.stderr)
    return 1


def page() -> str:
    """The page's text."""
    default = compose_config([], CONFIGS)
    lines = [INTRODUCTION, "## Groups\n", "| group | option | |", "|---|---|---|"]
    chosen = default_options(CONFIGS)
    for group, names in group_options(CONFIGS).items():
        for name in names:
            mark = " *" if chosen.get(group) == name else ""
            summary = option_summary(CONFIGS / group / f"{name}.yaml", width=None)
            lines.append(f"| `{group}` | `{name}`{mark} | {_escaped(summary)} |")
    known: dict[type, str] = {}
    for section in fields(Config):
        if section.name not in ADDED:
            value = getattr(default, section.name)
            lines += _section(section.name, type(value), value, known)
    return "\n".join(lines) + "\n"


def explanations(cls: type) -> tuple[str, dict[str, str]]:
    """What the docstring of a dataclass says of the whole, and, with those of its bases, of each key."""
    whole, found = "", dict[str, str]()
    for one in reversed([base for base in cls.__mro__ if is_dataclass(base)]):
        text = " ".join(inspect.cleandoc(one.__doc__ or "").split())
        key = "|".join(sorted((field.name for field in fields(one)), key=len, reverse=True))
        # `key: `, `key, other: ` or `key (remark): ` at the beginning of a sentence, and the text between two of them.
        names = rf"`?(?:{key})`?(?:, `?(?:{key})`?)*"
        whole, *rest = re.split(rf"(?:^|(?<=[.;)] ))({names})(?: \(([^)]*)\))?: ", text)
        for keys, remark, said in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            several = keys.replace("`", "").split(", ")
            together = ", ".join(f"`{name}`" for name in several) + ": " if len(several) > 1 else ""
            found |= dict.fromkeys(several, f"{together}{f'{remark}: ' if remark else ''}{said.strip()}")
    return whole.strip(), found


def _section(path: str, cls: type, value: object, known: dict[type, str]) -> Iterator[str]:
    """A table of the keys of `cls`, whose default run's values `value` has, and those of the classes within. known: the
    classes that have one already, with its path."""
    yield f"\n## {path}\n" if "." not in path else f"\n### {path}\n"
    if cls in known:
        usual = {field.name: _own_default(field) for field in fields(cls)} if value is not None else {}
        others = [f"`{key}` {_shown(of)}" for key in usual if (of := getattr(value, key)) != usual[key]]
        has = f"; the default run has {', '.join(others)}" if others else ""
        yield f"Keys as those of [{known[cls]}](#{_anchor(known[cls])}){has}."
        return
    known[cls] = path
    whole, said = explanations(cls)
    own: list[str] = []
    inner: list[tuple[str, Any, object]] = []
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):  # type: ignore[arg-type]
        hint: Any = hints[field.name]
        name = f"{path}.{field.name}"
        current = MISSING if value is None else getattr(value, field.name)
        if is_dataclass(hint):
            inner.append((name, hint, None if current is MISSING else current))
            continue
        inner += [(f"{name}[...]", one, None) for one in _parts(hint) if isinstance(one, type) and is_dataclass(one)]
        row = f"`{field.name}`", type_name(hint), _default(field, current), said.get(field.name, "")
        own.append("| " + " | ".join(map(_escaped, row)) + " |")
    if whole:
        yield f"{whole}\n"
    if own:
        yield "| key | type | default | |"
        yield "|---|---|---|---|"
        yield from own
    for name, nested_cls, current in inner:
        yield from _section(name, nested_cls, current, known)


def type_name(hint: Any) -> str:
    """A type and its range in words, such as `integer ≥ 1`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _in_range(type_name(arguments[0]), arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of names to {type_name(arguments[1])}"
    if is_dataclass(hint):
        return "mapping (below)"
    return _NAMES[hint]


def _in_range(name: str, metadata: tuple[Any, ...]) -> str:
    limits = [part for one in metadata for part in (one, *getattr(one, "metadata", ()))]
    lower = [f"> {one.gt:,}" if isinstance(one, Gt) else f"≥ {one.ge:,}" for one in limits if isinstance(one, (Gt, Ge))]
    upper = [f"< {one.lt:,}" if isinstance(one, Lt) else f"≤ {one.le:,}" for one in limits if isinstance(one, (Lt, Le))]
    upper = [limit for limit in upper if limit != f"≤ {MOST:,}"]  # the introduction has it
    return " ".join([name, " and ".join([*lower, *upper])]).strip()


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for argument in get_args(hint):
        yield from _parts(argument)


def _default(field: Field[Any], current: object) -> str:
    own = _own_default(field)
    return _shown(own) if current in (MISSING, own) else f"{_shown(own)} → {_shown(current)}"


def _own_default(field: Field[Any]) -> object:
    return field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc, operator]


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} of them" if value and is_dataclass(value[0]) else str(value)
    if isinstance(value, dict) and value:
        return "{...}"
    return f"{value:g}" if isinstance(value, float) else shown(value) or '""'


def _escaped(text: str) -> str:
    text = text.replace("|", "\\|")
    return re.sub(r"(?<!`)<(?=[^ \d])", "&lt;", text)  # a tag to Markdown, except in code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
