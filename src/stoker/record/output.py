"""A terminal or pipe that may go away: the run then saves and stops instead of breaking where it stands."""

import errno
import os
import signal
from typing import Any, TextIO

__all__ = ["Output"]

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


class Output:
    """Writes to a stream. Where its reader is gone (`| head`, a closed terminal) the process gets SIGHUP.

    So a run stops cleanly, and one under `nohup` goes on with its record alone. Text that a full disk
    refuses is dropped: it stands in the record too, which waits for space.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """None: there is no stream (a closed stdout), and text goes nowhere."""
        self._stream = stream

    def write(self, text: str) -> int:
        if self._stream is None:
            return len(text)
        try:
            self._stream.write(text)
        except UnicodeEncodeError:  # an ASCII terminal
            self._stream.write(text.encode(self._stream.encoding, "replace").decode(self._stream.encoding))
        except OSError as error:
            self._failed(self._stream, error)
        return len(text)

    def flush(self) -> None:
        if self._stream is None:
            return
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(self._stream, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _failed(self, stream: TextIO, error: OSError) -> None:
        if error.errno not in _GONE:
            return
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nobody listens: it would kill without a save
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # what is still in buffers must not fail again
        os.close(nowhere)
        signal.raise_signal(signal.SIGHUP)
