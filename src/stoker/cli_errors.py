"""How the command line ends with an error."""

from typing import NoReturn

import typer

from stoker.errors import StokerError

__all__ = ["fail"]


def fail(error: StokerError | str) -> NoReturn:
    """The cause and the way out, no traceback; exit 1 (2 for a mistake in the command or the run file)."""
    from stoker.errors import ConfigError
    from stoker.record.printable import printable

    notes = getattr(error, "__notes__", [])
    typer.echo(printable("\n".join([f"error: {error}", *notes])), err=True)
    raise typer.Exit(2 if isinstance(error, ConfigError | str) else 1)
