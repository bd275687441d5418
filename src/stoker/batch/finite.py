"""Numbers that JSON can hold. No torch here."""

import math
from typing import Any

__all__ = ["finite"]


def finite(value: Any) -> Any:
    """The same of dicts, lists and tuples, with None for what is infinite or no number."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
