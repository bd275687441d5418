"""Real data-parallel ranks: gloo processes on this machine's loopback, started, waited for and ended under a deadline.

`launch` starts `python -m module FOLDER RANK RANKS` for each rank and waits; the module calls `run_rank`, which joins
the others and answers. What goes in and out are files in the folder: numbers as JSON, tensors as safetensors.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.batch.orphan import end_with
from stoker.errors import RunError

__all__ = ["Job", "launch", "run_rank"]

POLL_S = 0.02
GRACE_S = 5.0
SETTLE_S = 1.0
"""Once a rank has failed, for the others to end too."""
TAIL_LINES = 15
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What a rank says that fails because another one is gone."""


@dataclass(frozen=True)
class Job:
    """What a rank is asked to do."""

    rank: int
    ranks: int
    numbers: dict[str, Any]
    tensors: dict[str, Tensor]


def launch(
    module: str, ranks: int, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor], deadline_s: float
) -> list[dict[str, Any]]:
    """Each rank's answer, in order. RunError with the rank's own last lines where one fails, or none is done in
    time.
    """
    with tempfile.TemporaryDirectory(prefix="stoker-ranks-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(
            json.dumps({"deadline_s": deadline_s, "parent": os.getpid(), **numbers}), encoding="utf-8"
        )
        save_file(
            {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()},
            folder / "job.safetensors",
        )
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                children.append(_start(module, folder, rank, ranks))
            _wait(children, folder, time.monotonic() + deadline_s)
        finally:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # with whatever it started
                child.wait()
        return [json.loads(_answer(folder, rank).read_text("utf-8")) for rank in range(ranks)]


def run_rank(work: Callable[[Job], dict[str, Any]]) -> NoReturn:
    """In a rank's process: join the others, work, leave the answer, end. Ends by itself at the deadline."""
    code = 1
    try:
        _answer_for(work)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        # Not by way of the interpreter's end: a thread of gloo that asks for it there aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _answer_for(work: Callable[[Job], dict[str, Any]]) -> None:
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    numbers = json.loads((folder / "job.json").read_text("utf-8"))
    deadline_s = float(numbers["deadline_s"])
    end_with(numbers["parent"])
    faulthandler.dump_traceback_later(deadline_s + GRACE_S, exit=True)
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=deadline_s),
    )
    answer = work(Job(rank, ranks, numbers, load_file(folder / "job.safetensors")))
    written = _answer(folder, rank)
    written.with_suffix(".part").write_text(json.dumps(answer), encoding="utf-8")
    written.with_suffix(".part").rename(written)
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()


def _start(module: str, folder: Path, rank: int, ranks: int) -> subprocess.Popen[bytes]:
    paths = [str(Path(path).absolute()) for path in [*sys.path, "."]]
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "GLOO_SOCKET_IFNAME": loopback}
    with _log(folder, rank).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(folder), str(rank), str(ranks)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def _wait(children: list[subprocess.Popen[bytes]], folder: Path, until: float) -> None:
    while True:
        codes = [child.poll() for child in children]
        if any(codes):
            raise _blamed(children, folder)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > until:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            raise RunError(
                f"ranks {', '.join(map(str, waiting))} of {len(children)} were not done at the deadline; raise "
                "deadline_s, or "
                f"take fewer examples. The last lines of rank {waiting[0]}:\n{_tail(folder, waiting[0])}"
            )
        time.sleep(POLL_S)


def _blamed(children: list[subprocess.Popen[bytes]], folder: Path) -> RunError:
    """The error of the rank that failed by itself: the others lose their connection to it, and may be seen to end
    before it does.
    """
    until = time.monotonic() + SETTLE_S
    while any(child.poll() is None for child in children) and time.monotonic() < until:
        time.sleep(POLL_S)
    failed = {rank: child.returncode for rank, child in enumerate(children) if child.returncode}
    rank = next((rank for rank in failed if not any(word in _tail(folder, rank) for word in LOST)), min(failed))
    code = failed[rank]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit status {code}"
    return RunError(f"rank {rank} of {len(children)} {how}; its last lines:\n{_tail(folder, rank)}")


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _tail(folder: Path, rank: int) -> str:
    lines = _log(folder, rank).read_text("utf-8", errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])
