"""A checkpoint's configuration is untrusted data: reading it opens no connection and reveals no secret."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.checkpoint import files
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.config.schema import ConfigError
from scripts import replay
from tests.composing import CONFIGS, composed, saved_of

SECRET = "canary-1234"


@pytest.fixture(autouse=True)
def trap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection and any name lookup fails the test."""
    monkeypatch.setenv("CANARY", SECRET)

    def caught(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError(f"tried to connect: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", caught)
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
