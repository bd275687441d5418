"""A persistent child process that answers JSON requests under a deadline, and is replaced after a kill.

The parent waits for the child's pipe; the child waits for its stdin. Neither waits without a limit:
the child ends itself at the deadline (see `wire`), and the parent kills it a little later if it didn't.
A child is used by one thread; `kill` alone may come from another.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from stoker.errors import RewardError

__all__ = ["Child", "ChildDiedError", "ChildHungError"]

GRACE_S = 1.0
START_S = 120.0
PLAIN_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")


class ChildHungError(Exception):
    """The deadline passed; the text is the stack of the child's threads."""


class ChildDiedError(Exception):
    """The child ended by itself; the text says how."""


class Child:
    """Runs `python -m module`; `inherit=False` withholds the environment (API keys, tokens) from it."""

    def __init__(self, module: str, *, inherit: bool) -> None:
        self.module = module
        self.starts = 0
        self._inherit = inherit
        self._process: subprocess.Popen[bytes] | None = None
        self._stack: IO[bytes] | None = None
        self._buffer = b""
        self._killed = False
        self._lock = threading.Lock()
        """Held while the process begins or is reaped, so that `kill` never misses it or hits another."""

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start the process if it isn't running. Raises RewardError if it can't."""
        if self._process is not None:
            return
        names = os.environ if self._inherit else PLAIN_ENVIRONMENT
        environment = {name: os.environ[name] for name in names if name in os.environ}
        paths = [str(Path(path).absolute()) for path in [*sys.path, "."]]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        if not self._inherit:
            environment["PYTHONHASHSEED"] = "0"  # sympy's order of terms, hence its verdicts, repeat
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._buffer = b""
        with self._lock:
            if self._killed:
                self._stack.close()
                raise RewardError(f"the process for reward checks (`python -m {self.module}`) was ended with its run")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, str(self._stack.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                pass_fds=(self._stack.fileno(),),
                start_new_session=True,  # its own group: a kill takes what it started, Ctrl-C leaves it to us
            )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self.starts += 1
        try:
            self._read_line(time.monotonic() + START_S)  # the child says that its imports are done
        except (ChildHungError, ChildDiedError) as error:
            raise RewardError(
                f"the process for reward checks (`python -m {self.module}`) could not start: {error}; its own "
                "message is above. Most often a package is missing or broken: run that command, with 2 as argument"
            ) from None

    def ask(self, request: Mapping[str, Any], deadline_s: float, replies: int = 1) -> Iterator[dict[str, Any]]:
        """Send one request, yield its replies; each has `deadline_s`. Raises ChildHungError or ChildDiedError."""
        self.start()
        message = json.dumps({**request, "deadline_s": deadline_s}).encode() + b"\n"
        self._write(message, time.monotonic() + deadline_s + GRACE_S)
        received = 0
        try:
            while received < replies:
                line = self._read_line(time.monotonic() + deadline_s + GRACE_S)
                received += 1
                yield json.loads(line)
        finally:
            if received < replies:  # abandoned (Ctrl-C, say): its late replies must not answer the next request
                self.close()

    def ask_one(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send one request that has one reply. Raises ChildHungError or ChildDiedError."""
        return next(self.ask(request, deadline_s))

    def _write(self, message: bytes, until: float) -> None:
        """A pipe takes 64 KiB at once; the rest waits for the child to read."""
        assert self._process is not None
        assert self._process.stdin is not None
        pipe, left = self._process.stdin.fileno(), memoryview(message)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_WRITE)
            while left:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise self._fate(hung=True)
                try:
                    left = left[os.write(pipe, left) :]
                except OSError:
                    raise self._fate() from None

    def _read_line(self, until: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        stream = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise self._fate(hung=True)
                block = os.read(stream.fileno(), 1 << 16)
                if not block:
                    raise self._fate()
                self._buffer += block
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _fate(self, hung: bool = False) -> ChildHungError | ChildDiedError:
        """Reap the child and say what became of it."""
        assert self._process is not None
        assert self._stack is not None
        process = self._process
        if not hung:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                hung = True
        self._stack.seek(0)
        stack = self._stack.read().decode(errors="replace").strip()
        self.close()
        if hung or stack.startswith("Timeout"):
            return ChildHungError(stack)
        code = process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return ChildDiedError(f"{how}\n{stack}".strip())

    def close(self) -> None:
        """Kill the child and everything it started; a later `ask` starts a fresh one."""
        with self._lock:
            if self._process is None or self._stack is None:
                return
            self._kill_group()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._stack):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):  # unsent bytes of a request to a dead child
                        stream.close()
            self._process = self._stack = None

    def kill(self) -> None:
        """From any thread: end the child, and let no `ask` start another. Whoever waits for it gets an error.

        Its own thread still has to `close` it.
        """
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._kill_group()

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # it ended on its own, and left nothing behind
            os.killpg(self._process.pid, signal.SIGKILL)
