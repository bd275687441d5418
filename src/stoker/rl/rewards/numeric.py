r"""Read numbers as people and LaTeX write them, exactly, and compare them.

Read: `1,234`, `1 234`, `-3`, `.5`, `5.`, `1.2e5`, `1.2 \times 10^{5}`, `3/4`, `\frac{3}{4}`, `\frac34`,
`1 1/2`, `1\frac{1}{2}`, `50%`, `$18`, `18 dollars`, `5 cm^2`. Not read: `3,14` (a list or a decimal comma), `5x`.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["RELATIVE_TOLERANCE", "Number", "parse", "same"]

RELATIVE_TOLERANCE = 1e-6
"""Two numbers are equal exactly, or, where either was written with a decimal point, within this."""
MAX_LENGTH = 200
MAX_EXPONENT = 300

_CURRENCY = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_EXPONENT = r"(?:[eE](?P<e>[-+]?\d{1,4})|\s?(?:\\times|\\cdot|\*|x)\s?10\s?(?:\^|\*\*)\s?\{?(?P<p>[-+]?\d{1,4})\}?)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s?(?P<currency>[$€£¥₹]?)\s?(?P<sign2>[-+]?)(?:"
    rf"(?P<whole>\d+)?\s?\\frac\s?(?:\{{\s?(?P<ln>-?{_DECIMAL})\s?\}}|(?P<sn>\d))\s?"
    rf"(?:\{{\s?(?P<ld>-?{_DECIMAL})\s?\}}|(?P<sd>\d))"
    rf"|(?:(?P<mixed>\d+) )?(?P<n>\d+)\s?/\s?(?P<d>\d+)"
    rf"|(?P<decimal>{_DECIMAL}){_EXPONENT}?"
    rf")(?P<rest>.*)",
    re.DOTALL,
)
_UNIT = re.compile(
    r"(?P<space>\s*)(?P<unit>%|(?:\^\{?\\circ\}?|\\degree|°)\s?[CF]?|[A-Za-zµ][A-Za-zµ/^{}\d .*-]{0,60})"
)
_UNITS = {
    "percent": "%", "usd": "dollar", "buck": "dollar", "centimeter": "cm", "centimetre": "cm", "meter": "m",
    "metre": "m", "kilometer": "km", "kilometre": "km", "millimeter": "mm", "millimetre": "mm", "gram": "g",
    "kilogram": "kg", "kilo": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "liter": "l", "litre": "l", "inche": "in", "inch": "in", "foot": "ft", "feet": "ft", "degree": "deg",
    "mile": "mi", "cent": "cent", "euro": "euro", "pound": "pound", "dollar": "dollar",
}  # fmt: skip
_SHORT_UNITS = frozenset("cm m km mm g kg mg s ms min h l ml in ft mi deg n j w v a k hz kw pa mol".split())  # noqa: SIM905
_NOT_UNITS = frozenset("or and not to but plus minus times over if is".split())  # noqa: SIM905


@dataclass(frozen=True)
class Number:
    """An exact value, whether it was written with a decimal point or exponent, and its unit ("" if none)."""

    value: Fraction
    decimal: bool
    unit: str = ""


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip(".") or "0")


def _unit(rest: str) -> str | None:
    """The unit's canonical name, "" if there is none, None if the rest isn't a unit (`5x`, `3 or 4`)."""
    if not rest.strip():
        return ""
    match = _UNIT.fullmatch(rest.rstrip(". "))
    if match is None:
        return None
    words = match["unit"].lower().replace("{", "").replace("}", "").split()
    if match["unit"] == "%":
        return "%"
    if words[0][0] in "^\\°":
        return "deg"
    if len(words) > 4 or _NOT_UNITS & set(words) or re.search(r"\d", re.sub(r"\^\d", "", match["unit"])):
        return None
    name = " ".join(words)
    singular = name[:-1] if len(name) > 2 and name.endswith("s") else name
    name = _UNITS.get(singular, singular)
    stem = re.split(r"[/^ ]", name)[0]
    if (not match["space"] or len(stem) == 1) and stem not in _SHORT_UNITS and stem not in _UNITS.values():
        return None  # 5x, 5 i: a variable, not a unit
    return name


def _value(match: re.Match[str]) -> tuple[Fraction, bool] | None:
    if match["n"] is not None:
        denominator = int(match["d"])
        return (int(match["mixed"] or 0) + Fraction(int(match["n"]), denominator), False) if denominator else None
    if match["decimal"] is not None:
        exponent = int(match["e"] or match["p"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        written = "." in match["decimal"] or match["e"] is not None or match["p"] is not None
        return _fraction(match["decimal"]) * Fraction(10) ** exponent, written
    top, bottom = match["ln"] or match["sn"], match["ld"] or match["sd"]
    if not _fraction(bottom):
        return None
    return int(match["whole"] or 0) + _fraction(top) / _fraction(bottom), "." in top + bottom


def parse(text: str) -> Number | None:
    """The number that the whole (cleaned) text is, or None."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return None
    if len(text) > 2 and text[0] == "(" and text[-1] == ")":
        text = text[1:-1].strip()
    match = _NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["sign2"]):
        return None
    unit = _unit(match["rest"])
    value = _value(match)
    if unit is None or value is None:
        return None
    if match["currency"]:
        if unit not in ("", _CURRENCY[match["currency"]]):
            return None
        unit = _CURRENCY[match["currency"]]
    negative = "-" in (match["sign"], match["sign2"])
    return Number(-value[0] if negative else value[0], value[1], unit)


def _close(a: Fraction, b: Fraction, inexact: bool, tolerance: float) -> bool:
    if a == b:
        return True
    if not inexact or (a.denominator == 1 and b.denominator == 1):
        return False  # 12345678 and 12345679 differ by less than any useful tolerance, and are still different
    return abs(a - b) <= Fraction(tolerance) * max(abs(a), abs(b))


def same(reference: Number, answer: Number, tolerance: float = RELATIVE_TOLERANCE) -> bool:
    """Equal values with compatible units: a missing unit fits any, and 50 % is 50 or 0.5."""
    inexact = reference.decimal or answer.decimal
    units = {reference.unit, answer.unit} - {""}
    if len(units) > 1:
        return False
    pairs = [(reference.value, answer.value)]
    if reference.unit == "%" and answer.unit == "":
        pairs.append((reference.value / 100, answer.value))
    if answer.unit == "%" and reference.unit == "":
        pairs.append((reference.value, answer.value / 100))
    return any(_close(a, b, inexact, tolerance) for a, b in pairs)
