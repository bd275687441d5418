"""Trackers (TensorBoard, Weights & Biases) show a run elsewhere. The local record is the truth: a tracker that
fails, at the start or later, costs one warning and is left alone from then on.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Tracker", "open_trackers"]


class Tracker(Protocol):
    """Takes each step's metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files under the run folder's `tensorboard/`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides the points of steps that a resumed run does again
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step or None)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in repr(dict(config)).splitlines()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Offline unless WANDB_MODE says otherwise; wandb reads its key from the environment by itself."""

    def __init__(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "stoker"),
            name=folder.name,
            dir=str(folder),
            config=dict(config),
            mode=mode,
            # without meta: it would hold the command line, where people put keys
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, x_disable_meta=True
            ),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}


class _Forgiving:
    """A tracker whose failures end in one warning."""

    def __init__(self, name: str, inner: Tracker, warn: Callable[[str], None]) -> None:
        self._name, self._inner, self._warn = name, inner, warn
        self._alive = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda: self._inner.log(step, metrics))

    def close(self) -> None:
        self._try(self._inner.close)
        self._alive = False

    def _try(self, action: Callable[[], None]) -> None:
        if not self._alive:
            return
        try:
            action()
        except Exception as error:
            self._alive = False
            self._warn(_story(self._name, error))


def _story(name: str, error: Exception) -> str:
    hint = f" (pip install {name})" if isinstance(error, ImportError) else ""
    cause = f"{type(error).__name__}: {error}{hint}"
    return f"tracker {name} is off: {cause}. The run goes on; its own record stays complete"


def open_trackers(
    names: Sequence[str],
    folder: Path,
    config: Mapping[str, Any],
    *,
    warn: Callable[[str], None],
    first_step: int = 0,
) -> list[Tracker]:
    """The trackers that could be opened; each of the others gives one warning. `first_step`: where a resume goes on."""
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(_Forgiving(name, TRACKERS[name](folder, config, first_step), warn))
        except Exception as error:
            warn(_story(name, error))
    return opened
