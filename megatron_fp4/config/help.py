"""The text of `pretrain.py --help`."""

from __future__ import annotations

import re
import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_fp4.config.compose import compose_config, group_options
from megatron_fp4.config.errors import shown


def help_text(config_dir: str | Path) -> str:
    """Groups with their options, keys with their defaults, examples."""
    directory = Path(config_dir).resolve()
    default, chosen = compose_config([], directory), default_options(directory)
    lines = [
        "usage: pretrain.py [key=value ...]        torchrun --nproc-per-node 8 pretrain.py [key=value ...]",
        "",
        "Groups (group=option; * is the default):",
    ]
    for group, options in group_options(directory).items():
        lines.append(f"  {group}")
        width = max(map(len, options)) + 2
        for option in options:
            mark = "*" if chosen.get(group) == option else " "
            summary = option_summary(directory / group / f"{option}.yaml", 96 - width)
            lines.append(f"  {mark} {option:<{width}}{summary}")
    lines += ["", "Keys and their values in the default run (docs/configuration.md explains each):"]
    for section in fields(default):
        if is_dataclass(getattr(default, section.name)) and section.name != "after_switch":
            lines += _key_lines(getattr(default, section.name), section.name)
    lines += [
        "",
        "Examples:",
        "  pretrain.py                                         a tiny model in NVFP4, minutes on a CPU",
        "  pretrain.py precision=bf16 run.dir=runs/bf16        the same run without quantization",
        "  pretrain.py precision.fprop.weight.block=1x16       1x16 weights in fprop and, following it, in dgrad",
        "  pretrain.py precision.switch.when=0.9               change precision after 90% of the steps",
        "  pretrain.py experiment=nemotron_h_8b data=my_corpus parallel=tensor_4",
        "  pretrain.py 'experiment=[nemotron_h_8b,qaf]' data=my_corpus",
        "  pretrain.py --config-dir=mine model=my_model        with your own groups: mine/model/my_model.yaml",
        "  pretrain.py --multirun run.seed=1,2 precision=nvfp4,bf16 run.dir=runs/sweep   four runs, one after another",
        "  pretrain.py --cfg job train.steps=100               print the configuration (--resolve: with environment)",
        "  pretrain.py --info defaults                         what Hydra composes it of",
        "  pretrain.py --check train.steps=100                 check whether the run would start",
    ]
    return "\n".join(lines)


def default_options(directory: Path) -> dict[str, str]:
    """The option of each group in the default run."""
    defaults = yaml.safe_load((directory / "config.yaml").read_text())["defaults"]
    return {group: name for entry in defaults if isinstance(entry, dict) for group, name in entry.items() if name}


def option_summary(path: Path, width: int | None) -> str:
    """The first sentence of the comment at the top of a config file, shortened to `width` characters."""
    comment: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("# "):
            break
        comment.append(line[2:])
    sentence = re.split(r"(?<=[.;]) (?=[A-Z0-9])", " ".join(comment))[0].rstrip(".;")
    return sentence if width is None else textwrap.shorten(sentence, width=width, placeholder=" ...")


def _key_lines(node: Any, path: str) -> list[str]:
    """Lines `path: key=value ...` for the node's plain keys, and then for its nested nodes."""
    values = {field.name: getattr(node, field.name) for field in fields(node)}
    plain = "  ".join(f"{key}={shown(value)}" for key, value in values.items() if not is_dataclass(value))
    head, rest = f"  {path}:  ", "      "
    lines = textwrap.wrap(plain, 100, initial_indent=head, subsequent_indent=rest, break_on_hyphens=False)
    for key, value in values.items():
        lines += _key_lines(value, f"{path}.{key}") if is_dataclass(value) else []
    return lines
