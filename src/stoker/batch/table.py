"""Tables in text. No torch here."""

from collections.abc import Iterable

__all__ = ["as_table"]


def as_table(columns: Iterable[tuple[str, list[str]]]) -> list[str]:
    """Right-aligned lines, the head first; columns without a filled cell are left out."""
    shown = [(name, cells, max(len(name), *map(len, cells))) for name, cells in columns if any(cells)]
    rows = zip(*(cells for _, cells, _ in shown), strict=True)
    widths = [width for *_, width in shown]
    head = "  ".join(name.rjust(width) for name, _, width in shown)
    return [head, *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)]
