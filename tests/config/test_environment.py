"""Values of environment variables are used, and never written. A checkpoint's configuration is untrusted data: reading
it opens no connection and reveals no secret."""

import json
import logging
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.checkpoint import files
from megatron_fp4.config.compose import as_saved, compose_config, config_from_saved, to_yaml
from megatron_fp4.config.schema import Config, ConfigError
from megatron_fp4.runtime import errors
from megatron_fp4.runtime.run_state import read_state, write_state
from scripts import replay
from tests.composing import CONFIGS, composed, saved_of
from tests.programs import ROOT, Program, environments_of_ranks
from tests.test_pretrain import SMALL

SECRET = "s3cret-value"
TEXTS = {
    "data.cache_dir": "${oc.env:SECRET_DIR}/corpus",
    "run.dir": "${data.cache_dir}/run",  # through another key
    "data.eod_token": "${oc.env:NOT_SET,fallback}",
    "data.blends.first.code": "${oc.env:WEIGHT}",
    "data.phases[1].fraction": "${oc.decode:${oc.env:HALF,0.5}}",
    "data.phases[1].blend": "${data.blends.first}",
}


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("SECRET_DIR", SECRET)
    monkeypatch.setenv("WEIGHT", "0.8125")
    monkeypatch.delenv("NOT_SET", raising=False)
    second = ", ".join(f"{key}: '{TEXTS[f'data.phases[1].{key}']}'" for key in ("fraction", "blend"))
    own = [f"{key}={TEXTS[key]}" for key in ("data.cache_dir", "run.dir", "data.eod_token")]
    blends = f"data.blends={{first: {{code: '{TEXTS['data.blends.first.code']}', prose: 0.25}}}}"
    phases = f"data.phases=[{{name: a, fraction: 0.5, blend: {{code: 1.0}}}}, {{name: b, {second}}}]"
    return compose_config([*own, blends, phases], CONFIGS)


def test_values_are_used_and_not_written(config: Config) -> None:
    assert config.data.cache_dir == f"{SECRET}/corpus" and config.run.dir == f"{SECRET}/corpus/run"
    assert config.data.phases[1].blend == {"code": 0.8125, "prose": 0.25}
    assert (config.data.phases[1].fraction, config.data.eod_token) == (0.5, "fallback")
    assert config.from_environment == TEXTS
    saved = as_saved(config)
    for written in (to_yaml(config), json.dumps(saved)):
        assert SECRET not in written and "0.8125" not in written and "fallback}" in written
        assert "from_environment" not in written
    assert saved["data"]["phases"][1]["blend"] == TEXTS["data.phases[1].blend"]
    assert saved["data"]["phases"][0]["fraction"] == 0.5 and saved["train"]["steps"] == config.train.steps


def test_reading_a_saved_configuration_uses_the_current_environment(config: Config, monkeypatch) -> None:
    saved = saved_of(config)
    assert config_from_saved(saved, [], CONFIGS, trusted=True) == config
    monkeypatch.setenv("SECRET_DIR", "elsewhere")
    monkeypatch.setenv("NOT_SET", "now")
    again = config_from_saved(saved, ["train.steps=7", "precision=mxfp8"], CONFIGS, trusted=True)
    assert (again.run.dir, again.data.eod_token, again.train.steps) == ("elsewhere/corpus/run", "now", 7)
    assert again.precision.name == "mxfp8" and again.from_environment == TEXTS
    monkeypatch.delenv("SECRET_DIR")
    with pytest.raises(ConfigError, match=r"data\.cache_dir: Environment variable 'SECRET_DIR' not found"):
        config_from_saved(saved, [], CONFIGS, trusted=True)
    other = config_from_saved(saved, ["data.cache_dir=here"], CONFIGS, trusted=True)
    assert other.run.dir == "here/run" and "run.dir" not in other.from_environment


def test_recipes_of_a_switch_and_of_exceptions_may_use_the_environment(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RHT", "0")
    shutil.copytree(CONFIGS, tmp_path, dirs_exist_ok=True)
    own = "defaults: [nvfp4, _self_]\nname: of_here\nwgrad: {rht: '${oc.decode:${oc.env:RHT}}'}\n"
    (tmp_path / "precision" / "of_here.yaml").write_text(own)
    exception = "precision.exceptions=[{names: ['*.out_proj'], precision: of_here}]"
    config = compose_config([exception, "precision.switch.target=of_here", "precision.switch.when=0.5"], tmp_path)
    assert config.after_switch is not None and config.after_switch.wgrad.rht == 0
    saved = as_saved(config)
    for written in (saved["after_switch"], saved["precision"]["exceptions"][0]["recipe"]):
        assert written["wgrad"]["rht"] == "${oc.decode:${oc.env:RHT}}"
    assert config_from_saved(json.loads(json.dumps(saved)), [], tmp_path, trusted=True) == config


def test_a_saved_variable_whose_key_is_gone_changes_nothing() -> None:
    config = composed()
    assert config.from_environment == {}
    assert as_saved(replace(config, from_environment={"data.phases[7].name": "${oc.env:X}"})) == as_saved(config)


TOKEN, URL = "tok3n-1234567", "http://user:${oc.env:TOKEN}@127.0.0.1:9/web"


@pytest.mark.slow
def test_a_token_is_in_no_message_and_no_file_of_a_refusal(tmp_path: Path) -> None:
    """The data cannot be opened, on two ranks."""
    command = [ROOT / "pretrain.py", *SMALL, "run.device=cpu", "data=indexed", f"data.sources={{web: '{URL}'}}"]
    command += ["data.phases=[{name: a, blend: {web: 1}}]", "data.num_workers=0", f"run.dir={tmp_path}/run"]
    ranks = [Program(command, environment | {"TOKEN": TOKEN}) for environment in environments_of_ranks(2)]
    printed = "".join(rank.communicate(timeout=240)[0] for rank in ranks)
    written = "".join(path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert TOKEN not in printed + written and printed.count("\n") <= 3, printed
    for text in (printed, (tmp_path / "run" / "state.json").read_text()):
        assert URL in text


def test_a_token_is_in_no_traceback_and_no_record(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TOKEN", TOKEN)
    config = composed.__wrapped__(f"data.sources={{web: '{URL}'}}", "data.cache_dir=${oc.env:PWD}")
    error = RuntimeError(f"{config.data.sources['web']} is not there, nor {config.data.cache_dir}")
    errors._print_traceback(error)
    write_state(tmp_path, "crashed", 1, str(error), 0)
    record = logging.LogRecord("", 30, "", 1, "%s", (error,), None)
    logged, reason = errors.PrintableRecords("%(message)s").format(record), read_state(tmp_path)["reason"]
    for text in (capsys.readouterr().err, reason, logged, errors.error_line(error)):
        assert f"{URL} is not there, nor {os.environ['PWD']}" in text


@pytest.fixture(autouse=True)
def trap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's configuration is untrusted: any connection and any name lookup fails the test."""
    monkeypatch.setenv("CANARY", SECRET)
    connect = socket.socket.connect

    def caught(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError(f"tried to connect: {arguments}")

    # A path is the fork server's.
    monkeypatch.setattr(socket.socket, "connect", lambda s, to: connect(s, to) if isinstance(to, str) else caught(to))
    monkeypatch.setattr(socket, "getaddrinfo", caught)


def saved(section: str = "data", **values: Any) -> dict[str, Any]:
    content = saved_of(composed())
    content[section] |= values
    return content


@pytest.mark.parametrize(
    "data",
    [
        {"sources": {"code": "ftp://127.0.0.1/${oc.env:CANARY}/x"}},
        {"sources": {"code": ["/local/x", "http://127.0.0.1/x"]}},
        {"cache_dir": "/x/${oc.env:CANARY}"},
        {"tokenizer": "/local/tokenizer.json"},
    ],
)
def test_saved_data_paths_are_refused_unless_they_are_overridden_or_the_run_is_trusted(data: dict[str, Any]) -> None:
    untrusted = saved(kind="indexed", **data)
    (key,) = ("data.sources.code" if "sources" in data else f"data.{name}" for name in data)
    # An override of another source does not replace it.
    for overrides in ([], ["data.sources={prose: /mine}"]):
        with pytest.raises(ConfigError, match=rf"has {key}=.* give --trust-config if the run is yours") as caught:
            config_from_saved(untrusted, overrides, CONFIGS)
        assert SECRET not in str(caught.value)
    given = config_from_saved(untrusted, [f"{key}=/mine/x"], CONFIGS)
    assert "/mine/x" in (given.data.sources.get("code"), given.data.cache_dir, given.data.tokenizer)
    trusted = config_from_saved(untrusted, [], CONFIGS, trusted=True)
    assert (SECRET in str(trusted.data)) == ("CANARY" in str(data))


def test_variables_in_data_keys_are_dropped_if_no_data_is_opened() -> None:
    config = config_from_saved(saved(cache_dir="/x/${oc.env:CANARY}"), [], CONFIGS, opens_data=False)
    assert config.data.cache_dir is None and SECRET not in str(config)
    with pytest.raises(ConfigError, match=r"model\.hidden_dim=.* not used without your consent"):
        config_from_saved(saved("model", hidden_dim="${oc.decode:${oc.env:CANARY}}"), [], CONFIGS, opens_data=False)


@pytest.mark.parametrize("text", ["${oc.create:${oc.env:CANARY}}", "${hydra:runtime.cwd}", "${now:%Y}"])
def test_no_other_resolver_is_run(text: str) -> None:
    with pytest.raises(ConfigError, match=r"only the resolvers oc\.env and oc\.decode are allowed"):
        config_from_saved(saved(cache_dir=text), [], CONFIGS, opens_data=False)


def test_the_replay_command_refuses_an_untrusted_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    untrusted = saved(kind="indexed", sources={"code": "ftp://127.0.0.1/${oc.env:CANARY}/x"})
    record = files.write_file(folder / "trainer.json", json.dumps({"config": untrusted, "version": "0"}))
    files.write_manifest(folder, files.Manifest(1, 2, 0, 0, 1, {}, {"trainer.json": record}, "2"))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 3, "loss": 1.0}) + "\n")
    assert replay.main([str(folder), "--steps", "1"]) == 2
    printed = capsys.readouterr()
    assert "not used without your consent" in printed.err and SECRET not in printed.err + printed.out
