"""A configuration that comes out of a checkpoint is data: it reaches no network and takes no secret along."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.checkpoint import files
from megatron_fp4.config.compose import compose_config, config_from_saved
from megatron_fp4.config.environment import as_saved
from megatron_fp4.config.schema import ConfigError
from scripts import replay
from tests.composing import CONFIGS

SECRET = "canary-1234"


@pytest.fixture(autouse=True)
def trap(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here may open a connection or ask for a name."""
    monkeypatch.setenv("CANARY", SECRET)

    def caught(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError(f"a connection: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", caught)
    monkeypatch.setattr(socket, "getaddrinfo", caught)


def saved(**data: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(as_saved(compose_config([], CONFIGS))))
    content["data"].update(data)
    return content


@pytest.mark.parametrize(
    "source",
    [
        "ftp://127.0.0.1/${oc.env:CANARY}/x",
        "s3://bucket/x",
        "simplecache::http://127.0.0.1/x",
        "${oc.env:CANARY}://host/x",
        ["/local/x", "http://127.0.0.1/${oc.env:CANARY}"],
    ],
)
def test_a_url_is_refused_unless_it_is_given(source: Any) -> None:
    strange = saved(kind="indexed", sources={"code": source})
    with pytest.raises(
        ConfigError, match=r"data\.sources\.code.* not opened unasked; give data\.sources\.code"
    ) as caught:
        config_from_saved(strange, [], CONFIGS)
    assert SECRET not in str(caught.value)
    config = config_from_saved(strange, ["data.sources.code=s3://mine/x"], CONFIGS)
    assert config.data.sources == {"code": "s3://mine/x"}


@pytest.mark.parametrize("text", ["${oc.create:${oc.env:CANARY}}", "${hydra:runtime.cwd}", "${now:%Y}"])
def test_no_other_resolver_runs(text: str) -> None:
    with pytest.raises(ConfigError, match=r"only oc\.env and oc\.decode run in one"):
        config_from_saved(saved(cache_dir=text), [], CONFIGS, opens_data=False)


def test_a_local_folder_of_the_environment_is_looked_up() -> None:
    assert config_from_saved(saved(cache_dir="/x/${oc.env:CANARY}"), [], CONFIGS).data.cache_dir == f"/x/{SECRET}"


def test_a_strangers_checkpoint_is_not_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command, whose data would be opened."""
    folder = tmp_path / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    strange = saved(kind="indexed", sources={"code": "ftp://127.0.0.1/${oc.env:CANARY}/x"})
    record = files.write_file(folder / "trainer.json", json.dumps({"config": strange, "version": "0"}))
    files.write_manifest(folder, files.Manifest(1, 2, 0, 0, 1, {}, {"trainer.json": record}, "2"))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 3, "loss": 1.0}) + "\n")
    assert replay.main([str(folder), "--steps", "1"]) == 2
    printed = capsys.readouterr()
    assert "not opened unasked" in printed.err and SECRET not in printed.err + printed.out
