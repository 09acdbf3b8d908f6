from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Keys and shapes that megatron-core 0.16.1 saves; listed from its own models."""
    return json.loads((Path(__file__).parent / "megatron_golden.json").read_text())
