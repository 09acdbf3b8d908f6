"""What the schema's dataclasses share: numbers in their ranges, and no key that they do not have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, PlainValidator


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")  # pydantic would read 1 and 0
    return value


def _integer(value: Any) -> Any:
    if isinstance(value, float):
        raise ValueError("a number with a decimal point is no integer")  # pydantic would read 2.0 as 2
    return _number(value)


def _path_or_paths(value: Any) -> Any:
    paths = value if isinstance(value, list) else [value]
    if not all(isinstance(path, str) and path.strip() for path in paths) or not paths:
        raise ValueError("a path is a text that is not empty")
    return value


def _switch(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value  # as YAML and Hydra read true and false


Integer = Annotated[int, BeforeValidator(_integer)]
Number = Annotated[FiniteFloat, BeforeValidator(_number)]
AtLeastOne = Annotated[Integer, Field(ge=1)]
AtLeastZero = Annotated[Integer, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
PositiveShare = Annotated[Number, Field(gt=0, le=1)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
AutoSwitch = Annotated[Literal["auto", "true", "false"], BeforeValidator(_switch)]
PathOrPaths = Annotated[str | list[str], PlainValidator(_path_or_paths)]
STRICT = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
