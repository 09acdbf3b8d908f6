"""Writes megatron_golden.json: `PYTHONPATH=. python tests/exchange/make_megatron_golden.py`, with megatron-core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.exchange import megatron_core as theirs
from tests.exchange.megatron_cases import config_of
from tests.training.harness import launch

_WANTED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "hybrid": ("hybrid", {}, False),
    "hybrid with RoPE": ("hybrid with RoPE", {}, False),
    "transformer": ("transformer", {}, False),
    "transformer, numbered": ("transformer", {}, True),
    "transformer, local spec": ("transformer", {"local_spec": True}, False),
}


def main() -> None:
    calls = [
        (theirs.keys_of, (config_of(case).model, options, numbered)) for case, options, numbered in _WANTED.values()
    ]
    (found,) = launch(theirs.run_all, 1, calls, seconds=600.0)
    golden = {
        name: {"case": case, "options": options, "numbered": numbered, "keys": keys}
        for (name, (case, options, numbered)), keys in zip(_WANTED.items(), found, strict=True)
    }
    Path(__file__).with_name("megatron_golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
