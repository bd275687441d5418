"""SIGINT, SIGTERM and SIGHUP become a clean stop: a checkpoint first. A second signal quits at once."""

import os
import signal
import threading
from types import FrameType, TracebackType

__all__ = ["Interrupt", "Interrupted"]


class Interrupted(Exception):
    """A signal asked the run to stop; the step under way is abandoned if it has not updated yet."""


class Interrupt:
    """Remembers the first stop signal while installed; only the main thread can install handlers."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.at_once = False
        """True while waiting for someone else's work (rewards): the first signal then ends the wait."""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup: the run is to outlive its terminal
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)  # the user insists: no clean-up that could hang
        self.received = signal.Signals(number)
        if self.at_once:
            raise Interrupted(self.received.name)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells expect; 0 if none came."""
        return 128 + self.received if self.received else 0

    def check(self) -> None:
        """Raise Interrupted if a signal came: called where nothing is half done."""
        if self.received is not None:
            raise Interrupted(self.received.name)
