"""The types of configuration values: numbers with their ranges, and paths; and the strict mode of dataclasses."""

from __future__ import annotations

import re
from decimal import Decimal
from os.path import expanduser
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, FiniteFloat

# Powers of a thousand, as in counts of tokens and parameters: 10k is 10,000.
_POWERS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def _number(value: Any) -> Any:
    """Accepts text such as 10k or 1_000. (1e3 is a float in YAML and Hydra; pydantic accepts it as an integer.)"""
    if isinstance(value, bool):
        raise ValueError("give a number")  # pydantic would read 1 or 0
    if isinstance(value, str) and (parts := re.fullmatch(r"([-+]?\d[\d_]*\.?\d*(?:e[-+]?\d{1,3})?)([kKMBGT]?)", value)):
        return float(Decimal(parts[1]) * _POWERS[parts[2]])
    return value


def _path(value: str) -> str:
    if not value.strip():
        raise ValueError("give a path")
    return expanduser(value)


def _bool_as_text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value  # as YAML and Hydra read true and false


def _bool_as_error(value: Any) -> Any:
    return {False: "none", True: "absolute"}[value] if isinstance(value, bool) else value


Integer = Annotated[int, BeforeValidator(_number)]
Number = Annotated[FiniteFloat, BeforeValidator(_number)]
MOST = 10**9
"""The limit of counts, sizes and intervals: products of sizes must fit into 64 bits."""
AtLeastOne = Annotated[Integer, Field(ge=1, le=MOST)]
AtLeastZero = Annotated[Integer, Field(ge=0, le=MOST)]
Seed = Annotated[Integer, Field(ge=0, le=2**32 - 1)]
NumWorkers = Annotated[Integer, Field(ge=0, le=256)]
Seconds = Annotated[Integer, Field(ge=5, le=10**7)]
LearningRate = Annotated[Number, Field(gt=0, le=10)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
# The smallest tile of quantization and of the Hadamard transform has 16 tokens.
SequenceLength = Annotated[Integer, Field(ge=1, le=MOST, multiple_of=16)]
Share = Annotated[Number, Field(ge=0, le=1)]
PositiveShare = Annotated[Number, Field(gt=0, le=1)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
AutoSwitch = Annotated[Literal["auto", "true", "false"], BeforeValidator(_bool_as_text)]
FourOverSix = Annotated[Literal["none", "absolute", "squared"], BeforeValidator(_bool_as_error)]
PathText = Annotated[str, AfterValidator(_path)]
PathOrPaths = PathText | Annotated[list[PathText], Field(min_length=1)]
STRICT = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
