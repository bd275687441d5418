"""Child process: load a user's reward function and call it.

In the child the function runs in the main thread (so that signal-based timeouts of math-verify work),
and a hang, a crash or a leak in it can be ended without ending the run. Values come back as they are,
marked by kind; the parent judges them.
"""

import asyncio
import inspect
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from stoker.dotted import load
from stoker.errors import RewardError
from stoker.rl.rewards.adapters import BATCHED, CALLS, Log, resolve
from stoker.rl.rewards.wire import serve

__all__: list[str] = []


def scalar(value: Any) -> Any:
    """A float, None, or {"bad": repr, "type": name}. Coerced exactly: bool, int, numpy and torch scalars."""
    if value is None:
        return None
    shape = getattr(value, "shape", None)
    if shape is not None and tuple(shape) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (int, float)):  # bool is an int
        return float(value)
    return {"bad": repr(value)[:200], "type": type(value).__name__}


def values(result: Any) -> Any:
    """A list of scalars out of a list, tuple, array or tensor of one dimension; else {"bad", "type"}."""
    if hasattr(result, "tolist") and len(getattr(result, "shape", ())) == 1:
        result = result.tolist()
    if isinstance(result, (list, tuple)):
        return [scalar(value) for value in result]
    return {"bad": repr(result)[:200], "type": type(result).__name__}


def _plain(value: Any) -> Any:
    """JSON for the record: scalars as they are, everything else as text."""
    value = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _batch_reply(result: Any, log: Log) -> dict[str, Any]:
    if isinstance(result, dict):  # OpenRLHF
        if "rewards" not in result:
            return {"values": {"bad": repr(result)[:200], "type": "dict without 'rewards'"}}
        for name, logged in (result.get("extra_logs") or {}).items():
            listed = values(logged)
            found = listed if isinstance(listed, list) else [scalar(logged)]
            log.numbers[name] = [x for x in found if isinstance(x, float)]
        result = result["rewards"]
    columns = {name: [_plain(v) for v in column] for name, column in log.columns.items()}
    return {"values": values(result), "columns": columns, "metrics": log.numbers}


def _sample_reply(result: Any, log: Log) -> dict[str, Any]:
    extra: dict[str, list[Any]] = {}
    if isinstance(result, dict):  # verl
        if "score" not in result:
            return {"values": [{"bad": repr(result)[:200], "type": "dict without 'score'"}]}
        extra = {name: [_plain(value)] for name, value in result.items() if name != "score"}
        result = result["score"]
    return {"values": [scalar(result)], "columns": extra, "metrics": log.numbers}


class UserFunction:
    """The loaded function and the one event loop its coroutines run in."""

    def __init__(self) -> None:
        self.function: Any = None
        self.framework = ""
        self.fixed: dict[str, Any] = {}
        self.runner = asyncio.Runner()

    def answer(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A load request has one reply; a call has one for the batch, or one for each row in order."""
        if "load" in request:
            yield self._load(request)
        elif self.framework in BATCHED:
            yield self._reply(request["rows"], request["step"])
        elif inspect.iscoroutinefunction(self.function):
            yield from self._concurrently(request["rows"], request["step"])
        else:
            for row in request["rows"]:
                yield self._reply([row], request["step"])

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            function = load(request["load"], "reward function", RewardError)
            made = resolve(function, request["load"], request["signature"], request["kwargs"])
        except RewardError as error:
            return {"error": str(error)}
        except BaseException:
            return {"error": f"reward function '{request['load']}' failed to load", "traceback": traceback.format_exc()}
        self.function, self.framework, self.fixed = made
        return {"framework": self.framework, "batched": self.framework in BATCHED}

    def _reply(self, rows: Sequence[dict[str, Any]], step: int) -> dict[str, Any]:
        log = Log()
        try:
            result = CALLS[self.framework](self.function, rows, step, log, self.fixed)
            if inspect.isawaitable(result):
                result = self.runner.run(_awaited(result))
            return (_batch_reply if self.framework in BATCHED else _sample_reply)(result, log)
        except RewardError as error:
            return {"contract": str(error)}
        except BaseException:  # sys.exit() in a reward is its fault, not the end of the child
            return {"traceback": traceback.format_exc()}

    def _concurrently(self, rows: Sequence[dict[str, Any]], step: int) -> Iterator[dict[str, Any]]:
        """Coroutines of one step wait for their services together; replies still come in order."""

        async def one(row: dict[str, Any]) -> dict[str, Any]:
            log = Log()
            try:
                return _sample_reply(await CALLS[self.framework](self.function, [row], step, log, self.fixed), log)
            except RewardError as error:
                return {"contract": str(error)}
            except BaseException:
                return {"traceback": traceback.format_exc()}

        async def all_of_them() -> list[asyncio.Task[dict[str, Any]]]:
            return [asyncio.create_task(one(row)) for row in rows]

        for task in self.runner.run(all_of_them()):
            yield self.runner.run(_awaited(task))


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    serve(UserFunction().answer)
