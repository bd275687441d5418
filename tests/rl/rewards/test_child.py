import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.errors import RewardError
from stoker.rl.rewards.child import Child, ChildDiedError, ChildHungError

SYMBOLIC = "stoker.rl.rewards.symbolic"
USERCODE = "stoker.rl.rewards.usercode"
HANG = {"reference": "x^{9}", "answer": r"10^{10^{10^{10}}} + x"}


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # a zombie that nobody has waited for is gone too
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def pid_of(child: Child) -> int:
    assert child._process is not None
    return child._process.pid


def test_a_large_request_to_a_child_that_does_not_read_has_a_deadline() -> None:
    child = Child(SYMBOLIC, inherit=False)
    child.start()
    os.kill(pid_of(child), signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(ChildHungError):
        child.ask_one({"reference": "x" * 1_000_000, "answer": "1"}, 0.5)
    assert time.monotonic() - started < 10
    large = {"reference": "x+1", "answer": "1+x", "more than a pipe holds": " " * 300_000}
    assert child.ask_one(large, 60) == {"equal": True}
    child.close()


def test_one_process_answers_many_requests_and_is_replaced_after_a_hang() -> None:
    child = Child(SYMBOLIC, inherit=False)
    assert not child.running
    assert child.ask_one({"reference": "x+1", "answer": "1+x"}, 20) == {"equal": True}
    first = pid_of(child)
    assert child.ask_one({"reference": "x+1", "answer": "x"}, 20) == {"equal": False}
    assert (pid_of(child), child.starts) == (first, 1)
    with pytest.raises(ChildHungError, match="most recent call first"):
        child.ask_one(HANG, 0.5)
    assert gone(first) and not child.running
    assert child.ask_one({"reference": "x+1", "answer": "1+x"}, 20) == {"equal": True}
    assert child.starts == 2
    child.close()
    child.close()  # twice is harmless


def test_a_killed_child_says_how_it_died() -> None:
    child = Child(SYMBOLIC, inherit=False)
    child.start()
    os.kill(pid_of(child), signal.SIGKILL)
    with pytest.raises(ChildDiedError, match="killed by SIGKILL"):
        child.ask_one({"reference": "x+1", "answer": "1+x"}, 20)
    assert not child.running


def test_a_child_that_cannot_start_is_an_error_not_a_zero() -> None:
    with pytest.raises(RewardError, match=r"`python -m stoker.rl.rewards.absent`\) could not start: exit status 1"):
        Child("stoker.rl.rewards.absent", inherit=False).start()


def test_an_abandoned_request_does_not_answer_the_next(write: Callable[[str], str]) -> None:
    path = write("def f(solution_str, ground_truth): return 0.5")
    load = {"load": f"{path}:f", "signature": "auto", "kwargs": {}}
    row = {"id": "a", "prompt": "p", "text": "t", "token_ids": [1], "answer": "x", "source": "s", "columns": {}}
    child = Child(USERCODE, inherit=True)
    assert child.ask_one(load, 60) == {"framework": "verl", "batched": False}
    replies = child.ask({"rows": [row, row], "step": 0}, 20, 2)
    assert next(replies)["values"] == [0.5]
    replies.close()  # type: ignore[attr-defined]
    assert not child.running
    assert child.ask_one(load, 60)["framework"] == "verl"
    child.close()


def test_failure_10_a_hung_child_ends_itself_though_its_parent_is_gone() -> None:
    code = (
        "from stoker.rl.rewards.child import Child\n"
        f"child = Child({SYMBOLIC!r}, inherit=False)\n"
        "child.start()\n"
        "print(child._process.pid, flush=True)\n"
        f"child.ask_one({HANG!r}, 2.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.5)  # the request is on its way
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gone(pid)
