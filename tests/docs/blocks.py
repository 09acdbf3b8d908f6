"""The fenced blocks of README and docs, and what each says of itself in an HTML comment above it, which no reader sees.

    <!-- doc: run -->                          commands that `make docs` runs, one page's in one folder after the other
    <!-- doc: run ci | with: train.steps=2 --> which every run of the tests runs too; overrides that make them short,
                                               and `args: --quick`, options for scripts
    <!-- doc: check | because: 8 GPUs -->      commands that are parsed and whose configurations are composed, and why
                                               they are not run; `ranks: 8` where the command does not say how many
    <!-- doc: overrides | with: data=indexed -->   no command, but overrides of one: composed, together with these
    <!-- doc: yaml data -->                    keys below `data`: composed as overrides of it
    <!-- doc: file configs/data/mine.yaml -->  a file of that content, which the page's other blocks find
    <!-- doc: output -->                       what the block before prints, numbers aside (with `exact`: with them)
    <!-- doc: shown | because: of an H200 -->  what something printed, or a folder holds; not compared, and why
    <!-- doc: text -->                         no command and no output: a drawing, a formula

`given: configs/model/8b.yaml=configs/model/nemotron_h_8b.yaml tokenizer.json checkpoints/8b` are a copy, a file and a
folder that a configuration refers to; `exit: 2` is the code that a command ends with. A comment of its own, `<!-- doc:
setup` with commands up to `-->`, is run before the blocks below it, unseen. In commands `...` stands for what the page
leaves out, which `with` puts there. A block whose lines begin with `$ ` has its output in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
KINDS = ("run", "check", "overrides", "yaml", "file", "output", "shown", "text", "setup")
OPTIONS = {"with", "args", "because", "ranks", "exit", "given"}
_FENCE = re.compile(r"( *)```(\w*)$")
_MARKER = re.compile(r" *<!-- doc: (.*?) *-->$")


@dataclass(frozen=True)
class Block:
    """A fenced block, or the commands of a `setup`.

    line: of its fence, from 1. kind, arguments, options: what its marker says; kind is empty where there is none.
    """

    page: Path
    line: int
    language: str
    content: str
    kind: str = ""
    arguments: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Such as `docs/data.md:12`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> str:
        """The shell's part of the block: all of it, or what follows `$ ` and its continued lines."""
        return "\n".join(line for shown, line in self._parts() if not shown)

    @property
    def shows(self) -> str:
        """What the block says that its commands print."""
        return "\n".join(line for shown, line in self._parts() if shown)

    def _parts(self) -> Iterator[tuple[bool, str]]:
        prompts = re.search(r"^\$ ", self.content, flags=re.MULTILINE) is not None
        continued = not prompts
        for line in self.content.splitlines():
            if prompts and line.startswith("$ "):
                line, continued = line[2:], True
            yield not continued, line
            continued = not prompts or (continued and line.endswith("\\"))


def blocks(page: Path) -> list[Block]:
    """All of them, in order."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    marker, i = "", 0
    while i < len(lines):
        if lines[i].startswith("<!-- doc: setup"):
            end = lines.index("-->", i)
            found.append(Block(page, i + 1, "", "\n".join(lines[i + 1 : end]), *_parsed(lines[i][10:])))
            i = end
        elif match := _MARKER.match(lines[i]):
            marker = match[1]
        elif match := _FENCE.match(lines[i]):
            end = next(j for j in range(i + 1, len(lines)) if lines[j] == f"{match[1]}```")
            inside = [line.removeprefix(match[1]) for line in lines[i + 1 : end]]
            found.append(Block(page, i + 1, match[2], "\n".join(inside), *_parsed(marker)))
            marker, i = "", end
        elif lines[i].strip():
            assert not marker, f"{page.name}:{i}: the marker {marker!r} is not above a block"
        i += 1
    return found


def _parsed(marker: str) -> tuple[str, tuple[str, ...], dict[str, str]]:
    first, *others = (part.strip() for part in marker.split(" | "))
    kind, *arguments = first.split() or [""]
    options = {key.strip(): value.strip() for key, _, value in (other.partition(":") for other in others)}
    return kind, tuple(arguments), options
