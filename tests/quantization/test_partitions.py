"""Any partition of a tensor's rows has the codes of the whole."""

import pytest

from tests.quantization.partitions import CASES, check_parts


@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_codes_of_the_whole(name: str) -> None:
    check_parts(CASES[name], "cpu")
