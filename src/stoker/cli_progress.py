"""What the command line tells while it works: on stderr, so that what is printed at the end stands alone."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from stoker.record.printable import printable
from stoker.record.progress import duration

if TYPE_CHECKING:
    from stoker.batch.certificate import Trial

__all__ = ["parts", "trial"]

SHORT_SECONDS = 3.0
"""Work that is over in so long needs no word."""


def trial(trial: "Trial", left: int | None) -> None:
    """A line for a trial that has ended; `left`: about how many more there are."""
    peak = "" if trial.peak_bytes is None else f", peak {trial.peak_bytes / 2**20:,.1f} MiB"
    more = "" if left is None else f"; about {left} more, {duration(left * trial.seconds)}"
    typer.echo(f"{trial.size:,}: {trial.end}{peak}, {trial.seconds:.1f} s{more}", err=True)


def parts(now: Callable[[], float] = time.monotonic) -> Callable[[str, float | None], None]:
    """Tells of parts of the work as they end, with the time since the beginning and about how many seconds are left.

    What takes a moment, with what is left after it, passes in silence.
    """
    start = now()

    def tell(what: str, left: float | None) -> None:
        spent = now() - start
        if spent + (left or 0.0) >= SHORT_SECONDS:
            more = "" if left is None else f"; about {duration(left)} left"
            typer.echo(f"{duration(spent)}  {printable(what)}{more}", err=True)

    return tell
