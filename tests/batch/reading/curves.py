"""Curves whose fault is known because they are drawn with it."""

import math

import numpy as np

from stoker.batch.reading.curve import Curve


def curve(
    level: "np.ndarray | list[float]",
    *,
    noise: float = 0.05,
    examples: int = 32,
    norms: "np.ndarray | list[float] | None" = None,
    rates: "list[float] | None" = None,
    agreement: float | None = 0.2,
    held: bool = True,
    seed: int = 0,
) -> Curve:
    """`level`: expected losses; updates scatter around them by `noise`."""
    draw = np.random.default_rng(seed)
    n = len(level)
    losses = [float(x) for x in np.asarray(level) + noise * draw.standard_normal(n)]
    at = [round((i + 1) * n / 8) for i in range(8)] if held else []
    return Curve(
        losses,
        examples,
        gradient_norms=[1.0] * n if norms is None else [float(x) for x in norms],
        rates=rates or [0.01] * n,
        agreements=[] if agreement is None else [0.0] + [agreement] * (n - 1),
        held_out=[(place, float(level[place - 1])) for place in at],
    )


def falling(count: int = 400, *, first: float = 2.3, last: float = 0.3, times: float = 8.0) -> "np.ndarray":
    """Exponentially, so often by e."""
    return last + (first - last) * np.exp(-times * np.arange(count) / count)


def even(count: int = 400, *, first: float = 2.3, last: float = 1.8) -> "np.ndarray":
    return np.linspace(first, last, count)


def burst(count: int = 400, *, first: float = 2.3, height: float = 20.0) -> "np.ndarray":
    """Up at once, then back to where it began."""
    made = np.full(count, first)
    made[2:12] = first * height
    return made


NAN = math.nan
