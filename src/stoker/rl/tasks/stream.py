"""Training prompts without end: epochs reshuffled by (seed, epoch), sources mixed by weight, exact resume."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.errors import CheckpointError, DataError
from stoker.rl.tasks.split import rank
from stoker.rl.types import Prompt

__all__ = ["PromptStream"]


class _Cursor:
    """One source: where it stands, and prompts that were due when the same step already had them."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        self.prompts = {prompt.id: prompt for prompt in prompts}
        self.drawn = 0
        self.waiting: list[str] = []
        self._ids = list(self.prompts)
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._order = -1, self._ids

    @property
    def served(self) -> int:
        return self.drawn - len(self.waiting)

    @property
    def digest(self) -> str:
        return hashlib.blake2b("\0".join(self._ids).encode(), digest_size=8).hexdigest()

    def _next_id(self) -> str:
        epoch, offset = divmod(self.drawn, len(self._ids))
        if self._shuffle and epoch != self._epoch:
            self._order = sorted(self._ids, key=lambda prompt_id: rank(self._seed, epoch, prompt_id))
            self._epoch = epoch
        self.drawn += 1
        return self._order[offset]

    def take(self, present: Mapping[str, Prompt]) -> Prompt:
        """The next prompt that the step doesn't hold yet; call only while there is one."""
        for prompt_id in self.waiting:
            if prompt_id not in present:
                self.waiting.remove(prompt_id)
                return self.prompts[prompt_id]
        while (prompt_id := self._next_id()) in present:
            self.waiting.append(prompt_id)
        return self.prompts[prompt_id]


class PromptStream:
    """Draws the prompts of each step. No step holds a prompt twice, not even across the end of an epoch."""

    def __init__(
        self, prompts: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float], *, seed: int, shuffle: bool = True
    ) -> None:
        total = sum(weights[name] for name in prompts)
        self._shares = {name: weights[name] / total for name in prompts}
        self._cursors = {name: _Cursor(found, seed, shuffle) for name, found in prompts.items()}
        self.rows = sum(len(cursor.prompts) for cursor in self._cursors.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        found = (prompt for cursor in self._cursors.values() for prompt in cursor.prompts.values())
        return max(len(prompt.token_ids) for prompt in found)

    @property
    def epochs(self) -> float:
        """Prompts served over rows: passes over the data so far."""
        return sum(cursor.served for cursor in self._cursors.values()) / self.rows

    def take(self, n: int, besides: Sequence[Prompt] = ()) -> list[Prompt]:
        """The next n prompts, all different and none of `besides`, which may leave fewer.

        Raises DataError if there are fewer rows than n.
        """
        if n > self.rows:
            raise DataError(f"{n} different prompts asked for, the task has {self.rows} training rows")
        present = {prompt.id: prompt for prompt in besides}
        used = {name: len(present.keys() & cursor.prompts.keys()) for name, cursor in self._cursors.items()}
        while len(present) < min(len(besides) + n, self.rows):
            name = self._due(used)
            prompt = self._cursors[name].take(present)
            present[prompt.id] = prompt
            used[name] += 1
        return list(present.values())[len(besides) :]

    def _due(self, used: Mapping[str, int]) -> str:
        """The source furthest behind its share, among those with a prompt left for this step."""
        total = 1 + sum(cursor.served for cursor in self._cursors.values())
        open_names = [name for name, cursor in self._cursors.items() if used[name] < len(cursor.prompts)]
        return max(open_names, key=lambda name: self._shares[name] * total - self._cursors[name].served)

    def state(self) -> dict[str, Any]:
        """JSON-able place in the data."""
        return {
            name: {"drawn": cursor.drawn, "waiting": list(cursor.waiting), "rows": cursor.digest}
            for name, cursor in self._cursors.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken. Raises CheckpointError if the rows are not the same ones."""
        if set(state) != set(self._cursors):
            raise CheckpointError(
                f"the checkpoint's task sources are {', '.join(state)}, the run's {', '.join(self._cursors)}: "
                "resume with the sources the run was started with"
            )
        for name, cursor in self._cursors.items():
            if state[name]["rows"] != cursor.digest:
                raise CheckpointError(
                    f"task source '{name}' no longer has the rows the run was started with: resume with the same data"
                )
        for name, cursor in self._cursors.items():
            cursor.drawn, cursor.waiting = state[name]["drawn"], list(state[name]["waiting"])
