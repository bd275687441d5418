"""What surrounds each command of `stoker batch`: errors, output that stands alone, the page."""

import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from stoker.batch.finite import finite
from stoker.cli_errors import fail
from stoker.dotted import users_traceback
from stoker.errors import ConfigError, RunError, StokerError

if TYPE_CHECKING:
    from stoker.report.html import Section

__all__ = ["aside", "framed", "show"]

_STDOUT, _STDERR = 1, 2


class _Terminated(SystemExit):
    """SIGTERM: what was begun is cleaned up, as for Ctrl-C."""


@contextmanager
def framed(html: Path | None, as_json: bool) -> Iterator[None]:
    """Stoker's own errors in words, those of a user's function with their traceback; SIGTERM ends in order.

    A page that can't be written is an error before anything is measured, and so is a training that ends the process.
    Where its C code crashes, its lines of Python are told on stderr.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(_STDERR)
    with _in_order():
        try:
            _check_page(html)
            yield
        except StokerError as error:
            _failed(error, as_json)
        except SystemExit as end:
            if isinstance(end, _Terminated):
                raise
            what = f"TARGET's own code ended the process (sys.exit({end.code!r}))"
            fix = 'what runs a training when its file is loaded belongs under `if __name__ == "__main__":`'
            _failed(RunError(f"{what}: {fix}"), as_json)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            _failed(RunError(users_traceback(error)), as_json)


def _failed(error: StokerError, as_json: bool) -> NoReturn:
    if as_json:
        typer.echo(json.dumps({"event": "error", "text": str(error)}))
    fail(error)


@contextmanager
def _in_order() -> Iterator[None]:
    """Within, SIGTERM raises, so that trials are ended and their folders taken away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise _Terminated(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_page(html: Path | None) -> None:
    if html is None:
        return
    if not html.parent.is_dir():
        raise ConfigError(f"--html {html}: there is no folder {html.parent}: make it, or choose another place")
    if html.is_dir() or not os.access(html if html.exists() else html.parent, os.W_OK):
        raise ConfigError(f"--html {html} can't be written: choose another place")


@contextmanager
def aside() -> Iterator[None]:
    """Within, what the user's code or a library prints goes to stderr: on stdout stands the result alone."""
    with ExitStack() as undo:
        undo.enter_context(redirect_stdout(sys.stderr))
        try:
            kept = os.dup(_STDOUT)
            os.dup2(_STDERR, _STDOUT)
        except OSError:  # one of them is closed
            pass
        else:
            undo.callback(os.close, kept)
            undo.callback(os.dup2, kept, _STDOUT)
        yield


def show(
    what: str,
    target: str,
    made: dict[str, Any],
    text: str,
    sections: Callable[[], Iterable["Section"]],
    html: Path | None,
    as_json: bool,
) -> None:
    """The result on stdout, and its page."""
    from stoker.record.printable import printable

    lines = (printable(line) for line in text.split("\n"))
    typer.echo(json.dumps(finite(made), allow_nan=False) if as_json else "\n".join(lines))
    if html is not None:
        from datetime import datetime
        from importlib.metadata import version

        from stoker.report.html import page, save

        when = f"{datetime.now().astimezone():%Y-%m-%d %H:%M}"
        save(html, page(f"{what} of {target}", f"stoker {version('stoker')}, {when}", list(sections()), text))
        typer.echo(f"wrote {html}", err=True)
