"""How long work tells what it has done."""

from collections.abc import Callable

__all__ = ["OnPart"]

OnPart = Callable[[str, float | None], object]
"""Told what was done, and about how many seconds all the rest will take; None: that isn't known."""
