"""Ranks agree on each trial: a size runs where it runs on all of them."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import distributed

from stoker.batch.trials import Ending
from stoker.errors import RunError, StokerError

__all__ = ["Agreement"]

_ENDS = ("error", "out of memory", "killed", "deadline", "ran")
"""From the worst to the best: what all agree on is the worst."""


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

    def reached(self, trial: Callable[[], Ending]) -> Ending:
        """What all agree on: the worst ending, and the largest peak. An error of one rank is raised on all."""
        if self._group is None:
            return trial()
        error: StokerError | None = None
        ending: Ending | None = None
        try:
            ending = trial()
        except StokerError as caught:
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
            raise RunError(f"the trial failed on rank {rank}: see its error there")
        if ending.end != _ENDS[worst]:
            return Ending(_ENDS[worst], {}, f"on rank {rank}", "")
        peak = max(int(one[1]) for one in all_)
        return replace(ending, told=ending.told | {"peak_bytes": peak or None}) if ending.end == "ran" else ending
