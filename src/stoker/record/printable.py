"""Text of models, data sets and libraries, made harmless for a terminal."""

import re
import unicodedata

__all__ = ["printable"]

_ESCAPES = re.compile(
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # operating-system commands: titles, links, clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)"  # device control and other strings
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # cursor, colours, erasing
    r"|\x1b[ -/]*[0-~]"  # the other escapes
)
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Invisible marks that show text in another order than it has."""


def printable(text: str) -> str:
    """Text without escape sequences, control codes (newline and tab stay), reordering marks and lone surrogates."""
    bare = _ESCAPES.sub("", text)
    return "".join(char for char in bare if char in "\n\t" or not _harmful(char))


def _harmful(char: str) -> bool:
    return char in _REORDERING or unicodedata.category(char) in ("Cc", "Cs")
