"""A user's reward function, run in a child process: deadlines hold, a crash is an error with a stack.

A function that is called per sample is timed per sample. One that is called per step has the sum of
its samples' deadlines, and when it raises, the samples are tried one by one to name those that did it;
where max_error_rate allows them, the call is repeated without them, so that a reward which compares
samples still sees them together.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from stoker.config import schema
from stoker.errors import RewardError
from stoker.rl.rewards.child import Child, ChildDiedError, ChildHungError
from stoker.rl.rewards.outcome import Answered, Outcome
from stoker.rl.types import Sample

__all__ = ["User"]

LOAD_S = 300.0
Reply = dict[str, Any]


def _plain(value: Any, where: str) -> Any:
    """A column's value as JSON has it; numpy scalars and arrays become numbers and lists."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where)
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(name): _plain(item, where) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    raise RewardError(
        f"{where} holds a {type(value).__name__}, which a reward function can't be given; "
        "use text, numbers, booleans, lists or tables"
    )


def _row(sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    return {
        "id": sample.id,
        "prompt": _plain(prompt.content, f"prompt {prompt.id}: its content"),
        "text": sample.text,
        "token_ids": sample.token_ids.tolist(),
        "answer": prompt.answer,
        "source": prompt.source,
        "columns": {name: _plain(v, f"prompt {prompt.id}: column '{name}'") for name, v in prompt.columns.items()},
    }


class User:
    """Starts the child and loads the function at once, so that a wrong path fails before the run does."""

    rule = False

    def __init__(self, config: schema.Reward, name: str) -> None:
        self.name = name
        self.range = config.range or (-1.0, 1.0)
        self.config = config
        self._child = Child("stoker.rl.rewards.usercode", inherit=True)
        self.framework, self._batched = self._load()

    def _load(self) -> tuple[str, bool]:
        kwargs = _plain(self.config.kwargs, f"reward '{self.name}': kwargs")
        request = {"load": self.config.function, "signature": self.config.signature, "kwargs": kwargs}
        try:
            reply = self._child.ask_one(request, LOAD_S)
        except (ChildHungError, ChildDiedError) as error:
            raise RewardError(f"reward '{self.name}': loading {self.config.function} failed: {error}") from None
        if "error" in reply:
            self._child.close()
            raise RewardError(f"{reply['error']}\n{reply.get('traceback', '')}".rstrip())
        return reply["framework"], reply["batched"]

    def _ask(self, rows: Sequence[dict[str, Any]], step: int, deadline_s: float, replies: int) -> Iterator[Reply]:
        """Raises ChildDiedError at a second death before a reply: one may be a stray kill, no fault of the function."""
        for last in (False, True):
            if not self._child.running:
                self._load()
            answered = False
            try:
                for reply in self._child.ask({"rows": rows, "step": step}, deadline_s, replies):
                    answered = True
                    yield reply
                return
            except ChildDiedError:
                if answered or last:
                    raise

    def __call__(self, samples: Sequence[Sample], step: int) -> Answered:
        """One outcome a sample. Raises RewardError where the function broke its contract."""
        if not samples:
            return Answered([])
        rows = [_row(sample) for sample in samples]
        if self._batched:
            return self._together(rows, step)
        answered = [self._answered(reply, rows[i : i + 1]) for i, reply in enumerate(self._one_by_one(rows, step))]
        metrics: dict[str, list[float]] = {}
        for one in answered:
            for name, numbers in one.metrics.items():
                metrics.setdefault(name, []).extend(numbers)
        return Answered([one.outcomes[0] for one in answered], metrics)

    def _one_by_one(self, rows: Sequence[dict[str, Any]], step: int) -> list[Reply]:
        """One reply a row; replies come in order, so the first one missing is the one that hung or crashed."""
        replies: list[Reply] = []
        while len(replies) < len(rows):
            rest = rows[len(replies) :]
            try:
                for reply in self._ask(rest, step, self.config.timeout_s, len(rest)):
                    replies.append(reply)  # noqa: PERF402 - what came before a hang must stay
            except ChildHungError as error:
                replies.append({"hung": str(error)})
            except ChildDiedError as error:
                if len(rows) - len(replies) == len(rest):  # it dies of this row, not behind others
                    replies.append({"traceback": f"the process that runs it died: {error}"})
        return replies

    def _together(self, rows: Sequence[dict[str, Any]], step: int) -> Answered:
        reply = self._batch(rows, step)
        if "traceback" not in reply:
            return self._answered(reply, rows)
        alone = [self._batch([row], step) for row in rows]
        failed = {i: one for i, one in enumerate(alone) if "traceback" in one or "hung" in one}
        if not failed:
            raise RewardError(
                f"reward '{self.name}' ({self.config.function}) raised on the {len(rows)} samples of step {step} "
                f"together, on none of them alone:\n{reply['traceback']}"
            )
        rest = [row for i, row in enumerate(rows) if i not in failed]
        repeated = self._answered(self._batch(rest, step), rest) if rest else Answered([])
        kept = iter(repeated.outcomes)
        outcomes = [
            self._answered(failed[i], [row]).outcomes[0] if i in failed else next(kept) for i, row in enumerate(rows)
        ]
        return Answered(outcomes, repeated.metrics)

    def _batch(self, rows: Sequence[dict[str, Any]], step: int) -> Reply:
        deadline_s = self.config.timeout_s * len(rows)
        try:
            return next(iter(self._ask(rows, step, deadline_s, 1)))
        except ChildHungError as error:
            if self.config.on_timeout is None and len(rows) > 1:
                raise RewardError(
                    f"reward '{self.name}' ({self.config.function}) did not return within {deadline_s:g} s "
                    f"({len(rows)} samples x timeout_s = {self.config.timeout_s:g}) and was killed. Make it faster, "
                    f"raise timeout_s, or set on_timeout to score such samples. It was at:\n{error}"
                ) from None
            return {"hung": str(error)}
        except ChildDiedError as error:
            return {"traceback": f"the process that runs it died: {error}"}

    def _answered(self, reply: Reply, rows: Sequence[dict[str, Any]]) -> Answered:
        """Judge one reply to the rows it is about."""
        if "contract" in reply:
            raise RewardError(f"reward '{self.name}' ({self.config.function}): {reply['contract']}")
        if "traceback" in reply:
            return Answered([Outcome(None, "error", reply["traceback"]) for _ in rows])
        if "hung" in reply:
            return Answered([Outcome(self.config.on_timeout, "timeout", reply["hung"]) for _ in rows])
        found = reply["values"]
        if isinstance(found, dict):
            raise self._broken(f"expected a list of {len(rows)} numbers, got {found['type']}: {found['bad']}")
        if len(found) != len(rows):
            raise self._broken(f"expected {len(rows)} values, one a sample, got {len(found)}")
        columns = reply.get("columns", {})
        for name, column in columns.items():
            if len(column) != len(rows):
                raise self._broken(f"log_extra('{name}', ...): expected {len(rows)} values, got {len(column)}")
        outcomes = [
            self._outcome(value, row["id"], {name: column[i] for name, column in columns.items()})
            for i, (value, row) in enumerate(zip(found, rows, strict=True))
        ]
        return Answered(outcomes, reply.get("metrics", {}))

    def _outcome(self, value: Any, sample_id: str, extra: dict[str, Any]) -> Outcome:
        if value is None:
            return Outcome(None, "abstained", extra=extra)
        if isinstance(value, dict):
            raise self._broken(f"sample {sample_id}: expected a number or None, got {value['type']}: {value['bad']}")
        low, high = self.range
        if not math.isfinite(value):
            raise self._broken(f"sample {sample_id}: returned {value}; return None to abstain")
        if not low <= value <= high:
            raise self._broken(
                f"sample {sample_id}: returned {value:g}, outside its range [{low:g}, {high:g}]; "
                "set range to what the function may return (values are never scaled)"
            )
        return Outcome(value, "scored", extra=extra)

    def _broken(self, what: str) -> RewardError:
        return RewardError(f"reward '{self.name}' ({self.config.function}): {what}")

    def close(self) -> None:
        self._child.close()

    def kill(self) -> None:
        """See `workers.OwnProcess`."""
        self._child.kill()
