"""What the results share: tables in text, and numbers that JSON can hold. No torch here."""

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["aligned", "finite"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns, each right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def finite(value: Any) -> Any:
    """The same of dicts, lists and tuples, with None for what is infinite or no number."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
