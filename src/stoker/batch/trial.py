"""Child process of `stoker.batch.trials`: one trial of one size, in memory of its own. JSON in, lines of JSON out.

Where the operating system or a library ends this process there is no last line: the parent reads how it ended.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from stoker import dotted
from stoker.batch.limits import Meter, capacity_bytes, warm_up
from stoker.batch.orphan import end_with
from stoker.batch.out_of_memory import is_out_of_memory, may_be_out_of_memory
from stoker.batch.rehearsal import rehearse
from stoker.batch.states import state_bytes
from stoker.batch.target import Maker, Target, Workload
from stoker.batch.tracing import trace
from stoker.errors import StokerError

__all__ = ["described", "ended_by"]

Say = Callable[..., None]
_TRACED = (2, 4)


def ended_by(error: Exception | SystemExit) -> dict[str, Any]:
    """How a trial ended that raised, as its last line; "kind" where the error is one of stoker's own."""
    if is_out_of_memory(error):
        end = "out of memory"
    elif may_be_out_of_memory(error):
        end = "doubtful"
    else:
        end = "error"
    own = isinstance(error, StokerError)
    text = str(error) if own else dotted.users_traceback(error)
    first = (str(error).strip().splitlines() or [""])[0]
    kind = type(error).__name__
    return {"end": end, "reason": f"{kind}: {first}", "traceback": text, "kind": kind if own else ""}


def _try(request: dict[str, Any], say: Say) -> dict[str, Any]:
    workload, meter = _made(request)
    say(at="made", device=str(workload.device))
    with meter.limited(workload.device, request["limit_bytes"]):
        done = rehearse(workload, request["size"], request["steps"], meter, request["longest"], lambda at: say(at=at))
    return {"end": "ran"} | vars(done)


def _inspect(request: dict[str, Any], say: Say) -> dict[str, Any]:
    workload, _ = _made(request)
    return {"end": "ran"} | described(workload)


def described(workload: Workload) -> dict[str, Any]:
    """What is known of a target without a step: unit, most, device, capacity and, where it shows them, its layers."""
    device = workload.device
    found = {"unit": workload.unit, "most": workload.most, "device": str(device), "trace": None}
    found["least"] = getattr(workload, "least", 1)  # of those that have one: below it a step takes no less
    found["capacity_bytes"] = capacity_bytes(device)
    if not isinstance(workload, Target):
        return found | {"untraced": f"a {type(workload).__name__} doesn't show its model"}
    sizes = _TRACED if workload.most is None or workload.most >= _TRACED[1] else (1, 2)
    try:
        seen = trace(workload, sizes).to_json()
    except Exception as error:
        if not (isinstance(error, StokerError) or is_out_of_memory(error)):
            raise  # it would fail in every trial: surfaces now
        return found | {"untraced": f"{type(error).__name__}: {error}"}
    optimizer = {"state_bytes": state_bytes(workload.optimizer), "device": device.type}
    return found | {"trace": seen | optimizer, "untraced": ""}


def _made(request: dict[str, Any]) -> tuple[Workload, Meter]:
    warm_up()
    if request["ranks"] > 1:
        _join(request)
    meter = Meter(fresh=True)
    return Maker(request["maker"], tuple(request["arguments"]))(), meter


def _join(request: dict[str, Any]) -> None:
    """The group of the trial's ranks, for targets that wrap their model in one."""
    from torch import distributed

    distributed.init_process_group(
        "gloo",
        init_method=f"file://{request['meeting']}",
        rank=int(os.environ["RANK"]),
        world_size=request["ranks"],
        timeout=timedelta(seconds=request["deadline_seconds"]),
    )


def main() -> None:
    """The request is the first argument's file; the lines go to the second's."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    end_with(request["parent"])
    if hasattr(signal, "alarm"):  # where the parent's end isn't noticed: not for ever
        signal.alarm(int(request["deadline_seconds"]) + 10)
    with Path(sys.argv[2]).open("w", encoding="utf-8", buffering=1) as lines:

        def say(**line: Any) -> None:
            lines.write(json.dumps(line) + "\n")

        try:
            last = (_inspect if request["inspect"] else _try)(request, say)
        except (Exception, SystemExit) as error:
            last = ended_by(error)
        say(**last)
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # a CUDA fault has been reported above
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
