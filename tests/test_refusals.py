"""Wrong input of every kind, more than there are keys: each is one line that names the value and the remedy."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import types
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

import assembly
from megatron_fp4.checkpoint.initialize import check_initialization
from megatron_fp4.config import errors
from megatron_fp4.config.compose import compose_config, config_from_saved
from megatron_fp4.config.environment import as_saved
from megatron_fp4.config.launcher import check_launch, place_in_run
from megatron_fp4.config.schema import Config, ConfigError
from tests.checks.composed import CONFIGS, changed, composed

# What a remedy sounds like.
_REMEDY = re.compile(
    r"\b(give|choose|set|use|write|did you mean|expected|correct|raise|lower|start|unset|export|leave|drop|make|run|"
    r"install|restore|needs|name|quote|written|has|takes|work)\b"
)
_HUGE = "100000000000000"


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A refusal that takes longer than a minute is none."""

    def give_up(*_: object) -> None:
        raise TimeoutError("no refusal after a minute")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def is_a_line(message: str) -> bool:
    """Whether it is one, with a remedy and nothing that only Python understands."""
    strange = ("\n", "Traceback", "object at 0x", "ValidationError")
    return bool(_REMEDY.search(message)) and not any(text in message for text in strange) and message[:4] != "None"


def line_of(error: pytest.ExceptionInfo[ConfigError]) -> str:
    assert is_a_line(str(error.value)), error.value
    return str(error.value)


# --- every key of the schema ------------------------------------------------------------------------------------------


def wrong_values(hint: Any) -> list[tuple[str, str]]:
    """Values that a key of this type cannot have, each with what the line says of it."""
    branches = [branch for branch in errors._branches(hint) if branch is not types.NoneType]
    if is_dataclass(hint):
        return [("7", ": expected keys from"), ("text", ": expected keys from")]
    if len(branches) > 1:
        return []
    of_no_number = [("abc", ": expected a"), ("[1,2]", ": expected a"), ("{a: 1}", ": expected a")]
    (kind,) = branches
    if typing.get_origin(kind) is typing.Annotated:
        kind, *_ = typing.get_args(kind)
        if kind is int:
            too_small = "-1" if "0 or more" in errors._range(hint, "greater_than_equal") else "0"
            ranges = [(_HUGE, " is out of range; give"), (too_small, " is out of range; give")]
            return [*ranges, ("1.5", ": expected an integer"), ("true", ": expected an integer"), *of_no_number]
        if kind is float:
            return [("-0.5", " is out of range; give"), ("nan", " is out of range; give"), *of_no_number]
        return [("nonsense", " is not known; choose one of")]
    if typing.get_origin(kind) is typing.Literal:
        return [("nonsense", " is not known; choose one of")]
    if kind is bool:
        return [("2", ": expected true or false"), ("maybe", ": expected true or false")]
    if kind is str:
        return [("[1,2]", ": expected text"), ("{a: 1}", ": expected text")]
    return [("7", ": expected a list" if typing.get_origin(kind) is list else ": expected a mapping")]


def of_every_key() -> list[tuple[str, str, str]]:
    """(key, wrong value, what is said): one for each key, the kinds of wrong taking turns."""
    cases = []
    for index, key in enumerate(errors._keys(Config, "")):
        if wrong := wrong_values(errors._type_at(key.split("."))):
            cases.append((key, *wrong[index % len(wrong)]))
    return cases


OF_EVERY_KEY = of_every_key()


@cache
def saved() -> dict[str, Any]:
    """Without a switch, whose target would be composed each time."""
    return json.loads(json.dumps(as_saved(composed("precision.switch.when=never"))))


@pytest.mark.parametrize(("key", "value", "said"), OF_EVERY_KEY, ids=lambda text: text[:60])
def test_every_key_refuses_what_it_cannot_be(key: str, value: str, said: str) -> None:
    """What YAML reads, straight to the schema: composing each would take minutes."""
    *path, leaf = key.split(".")
    keys = json.loads(json.dumps(saved()))
    node = keys
    for part in path:
        node = node[part]
    node[leaf] = yaml.safe_load(value)
    with pytest.raises(ValidationError) as error:
        Config(**keys)
    message = errors.explain_value(error.value, keys, CONFIGS)
    shown = value.replace(",", ", ") if value.startswith("[") else value
    assert f"{key}={shown}{said}" in message and is_a_line(message), message


def test_there_are_enough() -> None:
    everything = (OF_EVERY_KEY, COMMAND_LINES, VALUES, FILES, TOGETHER, ENVIRONMENTS)
    assert sum(map(len, everything)) >= 200, [len(table) for table in everything]


# --- the command line -------------------------------------------------------------------------------------------------

PHASE = "data.phases=[{{name: a, {}}}]"
COMMAND_LINES = [
    (["10"], "'10' has no value"),
    (["+train.steps=3"], "+train.steps=3: train.steps is a key already; write train.steps=3, without +"),
    (["+run.dir=x"], "+run.dir=x: run.dir is a key already"),
    (["train.steps.foo=1"], "train.steps.foo is not a key: train.steps is an integer"),
    (["train.steps = 10"], "'train.steps = 10' has blanks around the equals sign; write train.steps=10"),
    (["train.steps =10"], "'train.steps =10' has blanks around the equals sign; write train.steps=10"),
    (["train.steps", "=", "10"], "'train.steps' has blanks around its equals sign; write key=value as one word"),
    (["train.steps="], "train.steps=: expected an integer"),
    (["=10"], "'=10'"),
    (["--steps=10"], "--steps=10 is not an option; overrides are written key=value"),
    (["--check=yes"], "--check=yes is not an option"),
    (["-h=1"], "-h=1 is not an option"),
    ([PHASE.format("blend: {code: 1}, frac: 1")], "data.phases[0].frac is not a key"),
    (["data.phases={a: 1}"], "data.phases={a: 1}: expected a list like [...]"),
    (["model="], "model"),
    (["model=[tiny,hybrid_60m"], "'model=[tiny,hybrid_60m'; check the brackets"),
    (["precision=nvfp5"], "precision=nvfp5: there is no precision config of that name; did you mean nvfp4"),
    (["precision.switch.target=nvfp5"], "precision.switch.target=nvfp5 is not a precision config; did you mean nvfp4"),
    (["run.dir=${oc.env:NOT_SET_ANYWHERE}"], "environment variable NOT_SET_ANYWHERE, which is not set"),
    (["run.dir=${nowhere:1}"], "run.dir"),
    (["train.steps=${train.nowhere}"], "train.nowhere, which is not set"),
    (["data=indexed", "data.sources=/data/web"], "data.sources=/data/web: expected a mapping like {name: "),
]
VALUES = [
    (
        [PHASE.format("blend: hello")],
        "data.phases[0].blend=hello: expected a mapping like {name: a number} or the word",
    ),
    ([PHASE.format("blend: [code]")], "data.phases[0].blend=[code]: expected a mapping"),
    ([PHASE.format("blend: {code: much}")], "data.phases[0].blend.code=much: expected a number"),
    ([PHASE.format("blend: {code: 1}, steps: 0")], "data.phases[0].steps=0 is out of range; give 1 or more"),
    ([PHASE.format("blend: {code: 1}, tokens: 0")], "data.phases[0].tokens=0 is out of range; give a number above 0"),
    ([PHASE.format("blend: {code: 1}, tokens: 10X")], "data.phases[0].tokens=10X: expected a number"),
    (["train.steps=10x"], "train.steps=10x: expected an integer, such as 1000, 1e3, 10k or 2M"),
    (["train.steps=1e-3"], "train.steps=0.001: expected an integer"),
    (["train.steps=1.0005k"], "train.steps=1.0005k: expected an integer"),
    (["train.steps=k"], "train.steps=k: expected an integer"),
    (["train.steps=-1k"], "train.steps=-1k is out of range; give 1 or more"),
    (["train.steps=2T"], "train.steps=2T is out of range; give at most 1,000,000,000"),
    (["train.steps=1e400"], "train.steps=inf: expected an integer"),
    (["run.seed=4294967296"], "run.seed=4294967296 is out of range; give at most 4,294,967,295"),
    (["run.seed=1e20"], "run.seed=1e+20: expected an integer"),
    (["data.seed=4294967296"], "data.seed=4294967296 is out of range; give at most 4,294,967,295"),
    (["data.seed=first"], "data.seed=first: expected an integer"),
    (["data.num_workers=100000"], "data.num_workers=100000 is out of range; give at most 256"),
    (["data.prefetch=1000000"], "data.prefetch=1000000 is out of range; give at most 1,024"),
    (["optimizer.lr=1e30"], "optimizer.lr=1e+30 is out of range; give a number above 0 and at most 10, such as 0.002"),
    (["run.deterministic=2"], "run.deterministic=2: expected true or false"),
    ([f"model.num_query_heads={_HUGE}"], f"model.num_query_heads={_HUGE} is out of range; give at most 1,000,000,000"),
]


@pytest.mark.parametrize(("overrides", "said"), COMMAND_LINES, ids=lambda value: str(value)[:60])
def test_command_lines(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config(overrides, CONFIGS)
    assert said in line_of(error)


@pytest.mark.parametrize(("overrides", "said"), VALUES, ids=lambda value: str(value)[:60])
def test_values(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_from_saved(saved(), overrides, CONFIGS)
    assert said in line_of(error)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e3", 1000), ("10k", 10_000), ("1_000", 1000), ("1.5M", 1_500_000), ("'2e1'", 20), ("1K", 1000)],
)
def test_integers_may_be_written_shorter(text: str, number: int) -> None:
    steps = config_from_saved(saved(), [f"train.steps={text}"], CONFIGS).train.steps
    assert steps == number and type(steps) is int


def test_tokens_of_a_phase_may_be_written_shorter() -> None:
    phases = "data.phases=[{name: a, tokens: 61.44k, blend: {code: 1}}, {name: b, tokens: 5e5, blend: {code: 1}}]"
    assert [phase.tokens for phase in config_from_saved(saved(), [phases], CONFIGS).data.phases] == [
        61_440.0,
        500_000.0,
    ]


# --- files ------------------------------------------------------------------------------------------------------------

BINARY = bytes(range(256))
FILES = [
    ("model/mine.yaml", b"- a\n- b\n", ["model=mine"], "mine.yaml holds a list instead of keys; write `key: value`"),
    ("model/mine.yaml", b"some text\n", ["model=mine"], "mine.yaml holds the text 'some text' instead of keys"),
    ("model/mine.yaml", BINARY, ["model=mine"], "mine.yaml is no text in UTF-8"),
    ("model/mine.yaml", b"hidden_dim: [3\n", ["model=mine"], "mine.yaml, line 2: not valid YAML"),
    ("model/mine.yaml", b"a: 1\na: 2\n", ["model=mine"], "mine.yaml, line 2: not valid YAML (found duplicate key a)"),
    ("model/mine.yaml", b"hidden: 3\n", ["model=mine"], "mine.yaml: model.hidden is not a key"),
    ("model/mine.yaml", b"hidden_dim: wide\n", ["model=mine"], "mine.yaml: model.hidden_dim=wide: expected an integer"),
    ("experiment/mine.yaml", b"- a\n", ["experiment=mine"], "mine.yaml holds a list instead of keys"),
    ("precision/mine.yaml", BINARY, ["precision.switch.target=mine"], "mine.yaml is no text in UTF-8"),
    ("plan.yaml", BINARY, ["precision.bf16_blocks.file=FOLDER/plan.yaml"], "plan.yaml cannot be read"),
    ("plan.yaml", b"- a\n", ["precision.bf16_blocks.file=FOLDER/plan.yaml"], "no list of linears under the key `bf16`"),
    ("plan.yaml", b"bf16: [x]\n", ["precision.bf16_blocks.file=FOLDER/plan.yaml"], "lists 'x', which is no linear of"),
    ("list.yaml", BINARY, ["data.sources={web: FOLDER/list.yaml}"], "list.yaml: not valid YAML; write a list"),
    ("list.yaml", b"a: 1\n", ["data.sources={web: FOLDER/list.yaml}"], "list.yaml: holds a dict, not a list; write"),
    ("empty/x", b"", ["checkpoint.resume=FOLDER/empty"], "no whole checkpoint (manifest.json is missing); give auto"),
    ("empty/x", b"", ["checkpoint.resume=FOLDER/nowhere"], "nowhere is no checkpoint folder; give auto, never or"),
    ("a/manifest.json", b"{}", ["checkpoint.resume=FOLDER/a"], "no whole checkpoint (manifest.json has changed since"),
    ("a/manifest.json", BINARY, ["checkpoint.resume=FOLDER/a"], "no whole checkpoint (manifest.json is not readable"),
    (
        "a/checkpoints/step_00000002/x",
        b"",
        ["checkpoint.resume=FOLDER/a"],
        "it has some inside: give FOLDER/a/checkpoints/step_00000002",
    ),
    ("empty/x", b"", ["checkpoint.initialize_from=FOLDER/empty"], "empty has no checkpoint; give the path of one"),
]


@pytest.mark.parametrize(("name", "content", "overrides", "said"), FILES, ids=lambda value: str(value)[:40])
def test_files(name: str, content: bytes, overrides: list[str], said: str, tmp_path: Path) -> None:
    of_configs = name.split("/")[0] in ("model", "precision", "experiment")
    path = (tmp_path / "configs" if of_configs else tmp_path) / name
    if of_configs:
        shutil.copytree(CONFIGS, tmp_path / "configs")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    given = [override.replace("FOLDER", str(tmp_path)) for override in overrides]
    with pytest.raises(ConfigError) as error:
        if of_configs:
            compose_config(given, tmp_path / "configs")
        if name == "list.yaml":
            given += ["data.kind=indexed", "data.phases=[{name: a, blend: {web: 1}}]"]
        config = config_from_saved(saved(), [*given, f"run.dir={tmp_path}/run"], CONFIGS)
        assembly.check(config, 1, "cpu")
        check_initialization(config)
    assert said.replace("FOLDER", str(tmp_path)) in line_of(error)


# --- what does not go together ----------------------------------------------------------------------------------------


def two_phases(first: str) -> list[str]:
    return [f"data.phases=[{{name: a, {first}, blend: {{code: 1}}}}, {{name: b, blend: {{code: 1}}}}]"]


TOGETHER = [
    (two_phases("fraction: 0.001"), "phase 0 (a) gets none of the 300 steps: its length rounds to 0; make it longer"),
    (two_phases("tokens: 1"), "phase 0 (a) gets none of the 300 steps"),
    (two_phases("steps: 300"), "nothing is left for it; raise train.steps or shorten them"),
    (two_phases("steps: 1k"), "take 1000 steps of 300"),
    (["model.num_query_heads=1000000000", "model.num_kv_heads=3"], "KV heads that work: 1, 2, 4, 5, 8"),
    (["model.hidden_dim=999999984", "model.vocab_size=1000000000"], "parameters, 999,999,984,000,000,000 of them in"),
    (["model.ffn_dim=999999984", "model.hidden_dim=999999984"], "more than any run can hold (1e+14); lower"),
    (["train.steps=1000000000", "train.global_batch_size=1000000000"], "more than a run can count (1e18); lower"),
    (["train.sequence_length=1000000000", "train.micro_batch_size=4"], "more than kernels can count (2,147,483,647)"),
    (["logging.wandb=online"], "logging.wandb=online needs a key, and none is found in WANDB_API_KEY or ~/.netrc"),
    (["logging.profile_steps=[5]"], "logging.profile_steps=[5] is no window of this run's 300 steps"),
    (["logging.profile_steps=[5, 400]"], "logging.profile_steps=[5, 400] is no window"),
    (["run.file_mode=640"], "run.file_mode=640 is no file mode"),
    (["run.dir=' '"], "run.dir is empty"),
    (["train.sequence_length=100"], "train.sequence_length=100 is not a multiple of 16; use 96 or 112"),
    (["train.micro_batch_size=3"], "train.global_batch_size=8 is not a multiple of"),
    (["parallel.tensor=1000000000"], "parallel.tensor=1000000000 x parallel.replicate=1 does not divide the 1 ranks"),
    (["parallel.sequence=true"], "parallel.sequence=true has no effect"),
    (["schedule.warmup_fraction=0.9"], "overlap: their sum must not exceed 1"),
    (["precision.switch.when=1.5"], "precision.switch.when=1.5 is not never"),
    (["precision.bf16_blocks.names=['*']"], "precision=nvfp4 leaves none of the 12 linears quantized (blocks.0.mixer"),
    (["precision.switch.when=1e9"], "precision.switch.when=1"),
    (["model.pattern=MXM"], "'X' at position 1 is no block; use"),
    (["run.device=cuda"], "this machine offers no CUDA device; use run.device=auto or cpu"),
]


@pytest.mark.parametrize(("overrides", "said"), TOGETHER, ids=lambda value: str(value)[:60])
def test_what_does_not_go_together(
    overrides: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError) as error:
        assembly.check(config_from_saved(saved(), overrides, CONFIGS), 1, "cpu")
    assert said in line_of(error)


def test_a_key_of_wandb_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    online = changed(composed(), {"logging.wandb": "online"})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password 0123\n")
    assembly.check(online, 1, "cpu")
    (tmp_path / ".netrc").unlink()
    (tmp_path / ".netrc").write_text("machine wandb.example:8443 login user password 0123\n")
    with pytest.raises(ConfigError, match="needs a key"):
        assembly.check(online, 1, "cpu")
    (tmp_path / "settings").write_text("[default]\nbase_url = https://wandb.example:8443\n")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))  # `wandb login --host` writes the address there
    assembly.check(online, 1, "cpu")
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "0123")
    assembly.check(online, 1, "cpu")


def test_short_trials_may_leave_a_phase_without_steps() -> None:
    assembly.check(changed(composed(), {"train.steps": 4}), 1, "cpu")


# --- the launcher's environment ---------------------------------------------------------------------------------------

RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
ENVIRONMENTS = [
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is out of range: it lies between 1 and 1,048,576"),
    ({"WORLD_SIZE": "-2"}, "WORLD_SIZE=-2 is out of range"),
    ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc is no whole number"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE is empty"),
    ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE=2.0 is no whole number"),
    ({"WORLD_SIZE": "1" + "0" * 12}, "WORLD_SIZE=1000000000000 is out of range"),
    ({"WORLD_SIZE": "9" * 5000}, "is no whole number"),
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4, but RANK is not set"),
    ({**RANK, "RANK": "2"}, "RANK=2 is out of range: it lies between 0 and 1, because WORLD_SIZE=2"),
    ({**RANK, "RANK": "-1"}, "RANK=-1 is out of range"),
    ({**RANK, "RANK": "first"}, "RANK=first is no whole number"),
    ({**RANK, "RANK": ""}, "RANK is empty"),
    ({"RANK": "0"}, "RANK=0 is set and WORLD_SIZE is not"),
    ({**RANK, "LOCAL_RANK": "x"}, "LOCAL_RANK=x is no whole number"),
    ({**RANK, "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=4 is out of range: it lies between 0 and 1"),
    ({**RANK, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 is out of range"),
    ({**RANK, "MASTER_PORT": "http"}, "MASTER_PORT=http is no whole number"),
    ({**RANK, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is out of range: it lies between 1 and 65,535"),
    ({**RANK, "MASTER_PORT": ""}, "RANK=0 is set and MASTER_PORT is not"),
    ({**RANK, "MASTER_ADDR": " "}, "RANK=0 is set and MASTER_ADDR is not"),
]


@pytest.mark.parametrize(("environment", "said"), ENVIRONMENTS, ids=str)
def test_environments(environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(ConfigError) as error:
        check_launch()
    assert said in line_of(error)


def test_environments_that_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launch()
    for name, value in {**RANK, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    check_launch()
    assert place_in_run() == (2, 0, 0)
