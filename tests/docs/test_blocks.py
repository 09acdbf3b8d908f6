"""Every block of README and docs says what it is, and every command in one can be started: its script, its arguments
and its configuration exist. Those marked `run ci` are started, and print what the page says."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import BPE

from megatron_fp4.config import compose
from megatron_fp4.config.compose import compose_config
from megatron_fp4.config.schema import ConfigError
from tests.composing import quick_composing
from tests.docs.blocks import KINDS, OPTIONS, PAGES, ROOT, Block, blocks
from tests.docs.commands import WrongCommandError, check, configuration
from tests.docs.running import Session, filled
from tests.docs.shell import Command, commands_of

BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [block for block in BLOCKS if block.kind in ("run", "check", "setup") and block.language in ("", "bash")]


def tokenizer() -> str:
    """A file with the tokens that fill-in-the-middle names by default, and no other."""
    empty = Tokenizer(BPE())
    empty.add_special_tokens(["<|endoftext|>", *(f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix"))])
    return str(empty.to_str())


# What stands in for files that configurations of the pages name, where these have to be readable.
GIVEN = {
    "tokenizer.json": tokenizer,
    "mix.yaml": lambda: "- /data/a\n",
    "plan.yaml": lambda: "bf16: [blocks.0.mixer.out_proj]\n",
}


def named(found: list[Block]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", found, ids=[block.name for block in found])


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The project's configurations, and those that the pages tell their reader to write."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(ROOT / "configs", folder / "configs")
    for block in BLOCKS:
        if block.kind == "file":
            (folder / block.arguments[0]).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.arguments[0]).write_text(block.content)
        for given in block.options.get("given", "").split():
            new, _, old = given.partition("=")
            (folder / new).parent.mkdir(parents=True, exist_ok=True)
            if old:
                shutil.copy(folder / old, folder / new)
            elif "." in new:
                (folder / new).write_text(GIVEN[Path(new).name]())
            else:
                (folder / new).mkdir(exist_ok=True)
    with quick_composing(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder / "configs"


@named(BLOCKS)
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.kind in KINDS, "no marker above it; tests/docs/blocks.py has them"
    assert block.options.keys() <= OPTIONS
    if block.kind in ("check", "shown"):
        assert block.options.get("because"), "it does not say why it is not run, or not compared"
    if block.kind in ("shown", "output", "text"):
        command = re.compile(r"(\$ |python |torchrun |make \w|sbatch )")
        starts = [line for line in block.content.splitlines() if command.match(line)]
        assert not starts, "commands are to be marked as such"
    if block.kind == "run" and block.language in ("", "bash"):
        assert "..." not in block.commands.split(), "what leaves something out cannot be run"


@named(COMMANDS)
def test_its_commands_could_be_started(block: Block, configs: Path) -> None:
    found = commands_of(block.commands, block.name)
    assert found, "no command in it"
    for command in found:
        check(filled(command, block), configs, int(block.options.get("ranks", 0)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_could_be_started(page: Path, configs: Path) -> None:
    text = re.sub(r"(?ms)^ *```.*?^ *```$|^<!-- doc: setup.*?-->", "", page.read_text())
    for found in re.findall(r"`((?:\w+=\S+ )*(?:python|torchrun|make|megatron-fp4|sbatch|pip install) [^`]+)`", text):
        for command in commands_of(found, page.name):
            if command.arguments[0] != "torchrun" or {"-m", "pretrain.py"} & {
                *command.arguments
            }:  # not an option alone
                check(command, configs)


@named([block for block in BLOCKS if block.kind in ("overrides", "yaml")])
def test_its_overrides_compose(block: Block, configs: Path) -> None:
    more = [*commands_of(f"pretrain.py {block.options.get('with', '')}", block.name)[0].arguments[1:]]
    if block.kind == "overrides":
        own = [*commands_of(f"pretrain.py {block.content}", block.name)[0].arguments[1:]]
    else:
        keys = yaml.safe_load(block.content)
        own = [f"{block.arguments[0]}.{key}={as_hydra(value)}" for key, value in keys.items()]
    assert own
    configuration([*more, *own], configs, int(block.options.get("ranks", 1)))


def as_hydra(value: object) -> str:
    """A value in the grammar of Hydra's overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_hydra(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_hydra, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@named([block for block in BLOCKS if block.language == "python"])
def test_its_python_names_what_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.content)):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []
        elif isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name == "cookbook.md" else [], id=page.name)
        for page in PAGES
        if any("ci" in block.arguments for block in blocks(page))
    ],
)
def test_what_is_run_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    session = Session(tmp_path, in_process=True)
    found = blocks(page)
    with quick_composing():
        for block, after in zip(found, [*found, None][1:], strict=True):
            if block.kind == "file" or "ci" in block.arguments:
                session.run(block, after)


def test_composing_quickly_is_composing() -> None:
    named, other = "precision.exceptions=[{names: ['*.out_proj'], precision: mxfp8}]", "data.max_epochs={code: 2}"
    overrides = ["experiment=qaf", "model=transformer_60m", named, other, "train.steps=7"]
    slowly = compose_config(overrides, ROOT / "configs")
    with quick_composing():
        assert [compose_config(overrides, ROOT / "configs") for _ in range(2)] == [slowly, slowly]


def test_composing_quickly_asks_hydra_once_for_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    hydras = compose.compose
    monkeypatch.setattr(compose, "compose", lambda name, overrides: asked.append(overrides) or hydras(name, overrides))
    with quick_composing():
        for steps, times in (("train.steps=7", 1), ("train.steps=8", 1), ("++train.steps=9", 2)):
            assert compose_config(["precision=bf16", steps], ROOT / "configs").train.steps == int(steps[-1])
            assert len(asked) == times


@pytest.mark.parametrize(
    "wrong",
    [
        "model=no_such",
        "train.stepz=3",
        "train.steps=x",
        "train.steps=1,2",
        "train.steps=[",
        "precision.switch.target=x",
    ],
)
def test_composing_quickly_says_what_composing_says(wrong: str) -> None:
    overrides = ["experiment=qaf", wrong, "run.seed=7"]
    with pytest.raises(ConfigError) as slowly:
        compose_config(overrides, ROOT / "configs")
    with quick_composing(ROOT / "configs"), pytest.raises(ConfigError) as quickly:
        compose_config(overrides, ROOT / "configs")
    assert str(quickly.value) == str(slowly.value)


def test_wrong_commands_are_seen(configs: Path) -> None:
    for wrong in (
        "python pretrain.py train.stepz=3",
        "python pretrain.py parallel.tensor=3",
        "python scripts/no_such.py",
        "python scripts/generate.py runs/a --temprature 1",
        "python scripts/plan_run.py --world-size 8 model=no_such",
        "make tarin",
        "make train ARGS='precision=nvfp5'",
        "torchrun --nproc-per-nod 8 pretrain.py",
        "pip install 'megatron_fp4[no_such]'",
        "notaprogram a",
    ):
        (command,) = commands_of(wrong, "here")
        with pytest.raises(WrongCommandError):
            check(command, configs)


def test_the_shell_is_followed() -> None:
    script = """
    base="a=1 b='x y'"
    for seed in 1 2; do torchrun --nproc-per-node 8 pretrain.py $base "run.seed=$seed" \\
        "p=$(python -c "print('*-' * 2)")" > out.txt; done   # a comment
    WORLD_SIZE=16 python pretrain.py ... | head && ...
    .venv/bin/pre-commit install
    """
    first = "torchrun", "--nproc-per-node", "8", "pretrain.py", "a=1", "b='x", "y'"
    *runs, left, right, last = commands_of(script, "here")
    assert runs == [Command((*first, f"run.seed={seed}", "p=*-*-")) for seed in (1, 2)]
    # The two of a pipe start side by side.
    piped = Command(("python", "pretrain.py", "..."), 16), Command(("head",))
    assert (left, right) in (piped, piped[::-1])
    assert last == Command((".venv/bin/pre-commit", "install"))
    with pytest.raises(ValueError, match=r"here: .*syntax error"):
        commands_of("for a in b; done", "here")
