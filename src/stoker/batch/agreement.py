"""Ranks agree on each trial: a size runs where it runs on all of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from stoker.batch.trials import Ending
from stoker.errors import RunError

__all__ = ["Agreement"]

_ENDS = ("error", "out of memory", "killed", "deadline", "ran")
"""From the worst to the best: what all agree on is the worst."""
_NONE = 2**62


class Agreement:
    """Of all processes of the default group, where there is one; else of this process alone."""

    def __init__(self) -> None:
        self._group: distributed.ProcessGroup | None = None
        self.ranks = 0
        """How many agree; 0: there is no group."""
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            self.ranks = distributed.get_world_size()
            # On the CPU, whatever the default group is: what is agreed on is that a device's memory is full.
            self._group = distributed.new_group(backend="gloo")

    def all_have(self, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What each finds of itself. An error of one rank is raised on all: none waits for it."""
        if self._group is None:
            return look()
        found: dict[str, Any] = {}

        def looked() -> Ending:
            found.update(look())
            return Ending("ran", {}, "", "")

        self.reached(looked)
        return found

    def smallest(self, value: int | None) -> int | None:
        """Of those that have one."""
        if self._group is None:
            return value
        mine = torch.tensor(_NONE if value is None else value)
        distributed.all_reduce(mine, distributed.ReduceOp.MIN, group=self._group)
        return None if mine == _NONE else int(mine)

    def reached(self, trial: Callable[[], Ending]) -> Ending:
        """What all agree on: the worst ending, and the largest peak. An error of one rank is raised on all."""
        if self._group is None:
            return trial()
        error: Exception | None = None
        ending: Ending | None = None
        try:
            ending = trial()
        except Exception as caught:
            error = caught
        end = _ENDS.index(ending.end) if ending else 0
        peak = ending.told.get("peak_bytes") or 0 if ending else 0
        mine = torch.tensor([end, peak])
        all_ = [torch.empty_like(mine) for _ in range(self.ranks)]
        distributed.all_gather(all_, mine, group=self._group)
        worst, rank = min((int(one[0]), rank) for rank, one in enumerate(all_))
        if error is not None:
            raise error
        if ending is None or _ENDS[worst] == "error":
            raise RunError(f"a trial, or the making of its target, failed on rank {rank}: see the error there")
        if ending.end != _ENDS[worst]:
            return Ending(_ENDS[worst], {}, f"on rank {rank}", "")
        peak = max(int(one[1]) for one in all_)
        return replace(ending, told=ending.told | {"peak_bytes": peak or None}) if ending.end == "ran" else ending
