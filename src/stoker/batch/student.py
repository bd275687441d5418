"""Student's t for means whose variance is estimated too, and the error of a median. No torch here."""

import math

__all__ = ["median_error", "quantile"]

_NORMAL = 1.959963984540054
_FIRST = (12.706204736432095, 4.302652729696142, 3.182446305283708)


def quantile(degrees: float) -> float:
    """The two-sided 95 % quantile for so many degrees of freedom (>= 1; a fraction is rounded down).

    From four degrees on the expansion in 1 / degrees (Abramowitz and Stegun 1964, 26.7.5), right to 0.05 %.
    """
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom: an interval needs at least 1")
    n = math.floor(degrees) if math.isfinite(degrees) else math.inf
    if n <= len(_FIRST):
        return _FIRST[int(n) - 1]
    z = _NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n**power for power, term in enumerate(terms, start=1))


def median_error(deviation: float, count: int) -> float:
    """Standard error of the median of `count` numbers, normal with that standard deviation; right for many."""
    return deviation * math.sqrt(math.pi / 2 / count)
