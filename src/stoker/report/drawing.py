"""What the pictures of a page share: text, lines, and colours as the page's variables, for light and dark alike."""

from collections.abc import Sequence
from html import escape

from stoker.record.printable import printable

__all__ = ["CHARACTER", "COLORS", "WIDTH", "svg", "text", "upright", "words"]

COLORS = ("--blue", "--amber", "--green", "--purple", "--rose", "--cyan", "--slate")
WIDTH = 860
CHARACTER = 6.6
"""Width of a character of 12 px text, a little generous."""


def text(value: object) -> str:
    """Escaped and printable, on one line."""
    return escape(printable(str(value)).replace("\n", " "))


def upright(x: float, top: float, bottom: float, color: str) -> str:
    """A dashed line at x."""
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke-dasharray="6 4" '
        f'style="stroke:var({color})" stroke-width="1.4"/>'
    )


def words(x: float, y: float, said: object, anchor: str, kind: str = "") -> str:
    """Text at a place; `kind` is a class of the page's style."""
    look = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>{text(said)}</text>'


def svg(height: float, label: str, parts: Sequence[str]) -> str:
    """One picture as wide as the page."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{text(label)}">\n{body}\n</svg>'
    )
