"""docs/configuration.md agrees with the schema."""

from scripts import configuration_reference as reference


def test_the_page_is_current_and_explains_every_key() -> None:
    page = reference.PAGE.read_text()
    assert page == reference.page(), "not current; run python scripts/configuration_reference.py"
    empty = [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert empty == [], "the docstrings of the classes in megatron_fp4/config do not explain these keys"
    for row in (
        "AdamW; 1-D parameters and biases are not decayed.\n",
        "| `beta1`; `beta2`; `eps` | number ≥ 0 and < 1; number > 0 | 0.9; 0.95; 1e-08 | of Adam. |",
        "| `keep` | integer ≥ 0 | 3 | how many to keep (0: all). |",
        "| `eod_token` | text or null | null |",
        "| `blend` | mapping of names to number ≥ 0 or `tokens` |",
    ):
        assert row in page
