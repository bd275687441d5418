"""Tables in text. No torch here."""

from collections.abc import Iterable, Sequence

__all__ = ["aligned", "as_table"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns, each right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def as_table(columns: Iterable[tuple[str, list[str]]]) -> list[str]:
    """The same of columns, each a head over its cells; those without a filled cell are left out."""
    shown = [[name, *cells] for name, cells in columns if any(cells)]
    return aligned(list(zip(*shown, strict=True)))
