"""What every table of the run file builds on: its strictness and its kinds of number."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

__all__ = [
    "BUILT_IN_REWARDS",
    "BelowOne",
    "Dtype",
    "Finite",
    "Fraction",
    "Name",
    "NonNegative",
    "NonNegativeInt",
    "Positive",
    "PositiveInt",
    "PositiveIntOrAuto",
    "Section",
    "Text",
]

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[\w .-]{0,60}$")]
"""Part of file names and of metric keys. Empty: one is made up."""
Dtype = Literal["float32", "bfloat16", "float16"]
BUILT_IN_REWARDS = ("math", "exact")
_LARGEST = 3.4e38
"""About what float32 holds, in which these numbers meet tensors."""


def _count_or_auto(value: Any) -> Any:
    """One complaint, where a union would make one for each of its members."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise PydanticCustomError("count_or_auto", "must be a whole number above 0, or 'auto'")


PositiveIntOrAuto = Annotated[PositiveInt | Literal["auto"], PlainValidator(_count_or_auto)]


class Section(BaseModel):
    """A frozen table of the run file; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _fits_tensors(self) -> Self:
        for key in type(self).model_fields:
            value = getattr(self, key)
            if isinstance(value, float) and abs(value) > _LARGEST:
                raise ValueError(f"{key} = {value:g} is more than float32 holds: use at most {_LARGEST:g}")
        return self
