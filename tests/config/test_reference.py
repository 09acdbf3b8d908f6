"""The reference of the configuration says what the schema has."""

from __future__ import annotations

from megatron_fp4.config.schema import CheckpointConfig, OptimizerConfig
from scripts import configuration_reference as reference


def test_the_page_is_current() -> None:
    current = reference.PAGE.read_text() == reference.page()
    assert current, "docs/configuration.md is not current; run python scripts/configuration_reference.py"


def test_every_key_is_explained() -> None:
    empty, section = [], ""
    for line in reference.PAGE.read_text().splitlines():
        section = line.lstrip("# ") if line.startswith("##") else section
        if line.startswith("| `") and line.endswith("|  |"):
            empty.append(f"{section}.{line.split('`')[1]}")
    assert empty == [], "the docstring of their class in megatron_fp4/config says nothing of these keys"


def test_keys_have_their_explanations_types_and_ranges() -> None:
    whole, said = reference.explanations(OptimizerConfig)
    assert whole == "AdamW; 1-D parameters and biases are not decayed."
    assert said["lr"] == "the peak learning rate." and said["beta2"] == "`beta1`, `beta2`, `eps`: of Adam."
    assert reference.explanations(CheckpointConfig)[1]["keep"] == "how many to keep (0: all)."
    page = reference.PAGE.read_text()
    for row in (
        "| `beta1` | number ≥ 0 and < 1 |",
        "| `interval` | integer ≥ 0 |",
        "| `eod_token` | text or null |",
        "| `blend` | mapping of names to number ≥ 0 or `tokens` |",
    ):
        assert row in page
