"""The child's side of the line protocol: one JSON request a line in, JSON replies a line out, no pickle.

A child that is asked to finish by a deadline dumps its stack to `stack_fd` and exits at it, even while
a C call holds the interpreter (faulthandler's watchdog is a C thread). So a hung child can't outlive
its deadline, also when its parent is gone.
"""

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["serve"]


def serve(answer: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]) -> None:
    """Answer requests until stdin closes. `{"deadline_s": s}` in a request is the limit for each reply."""
    stack_fd = int(sys.argv[1])
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a user's print() goes to the terminal, never into the protocol
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable(file=stack_fd)
    replies.write("{}\n")
    replies.flush()
    for line in requests:
        request = json.loads(line)
        deadline_s = float(request["deadline_s"])
        results = answer(request)
        while True:
            faulthandler.dump_traceback_later(deadline_s, exit=True, file=stack_fd)
            reply = next(results, None)
            faulthandler.cancel_dump_traceback_later()
            if reply is None:
                break
            try:
                replies.write(json.dumps(reply) + "\n")
                replies.flush()
            except BrokenPipeError:
                os._exit(1)  # the run was killed: nobody waits for the answer, or for a traceback
