import sys
import types
from pathlib import Path
from typing import Any

import pytest

from stoker.engine import trackers
from stoker.engine.trackers import open_trackers


class FakeWandb(types.ModuleType):
    """Stands in for the package: keeps what it was told, and fails from a given call on."""

    def __init__(self, fail_at: int = 10**9) -> None:
        super().__init__("wandb")
        self.settings: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False
        self.fail_at = fail_at
        self.calls = 0

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **settings: Any) -> "FakeWandb":
        self._call()
        self.settings = settings
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._call()
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished = True

    def _call(self) -> None:
        self.calls += 1
        if self.calls >= self.fail_at:
            raise ConnectionError("server is down")


def use(monkeypatch: pytest.MonkeyPatch, wandb: FakeWandb | None) -> None:
    monkeypatch.setitem(sys.modules, "wandb", wandb)


def test_wandb_is_offline_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb, warnings = FakeWandb(), []
    use(monkeypatch, wandb)
    (tracker,) = open_trackers(["wandb"], tmp_path / "run", {"seed": 1}, warn=warnings.append)
    tracker.log(3, {"reward/mean": 0.5})
    tracker.close()
    assert wandb.settings["mode"] == "offline"
    assert wandb.settings["name"] == "run"
    assert wandb.settings["config"] == {"seed": 1}
    assert wandb.logged == [(3, {"reward/mean": 0.5})]
    assert wandb.finished
    assert warnings == []
    monkeypatch.setenv("WANDB_MODE", "online")
    open_trackers(["wandb"], tmp_path, {}, warn=warnings.append)
    assert wandb.settings["mode"] == "online"


def test_failure_06_tracker_down_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    use(monkeypatch, FakeWandb(fail_at=1))
    assert open_trackers(["wandb"], tmp_path, {}, warn=warnings.append) == []
    assert warnings == [
        "tracker wandb is off: ConnectionError: server is down. The run goes on; its own record stays complete"
    ]


def test_failure_06_tracker_goes_down_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, warnings = FakeWandb(fail_at=3), []
    use(monkeypatch, wandb)
    (tracker,) = open_trackers(["wandb"], tmp_path, {}, warn=warnings.append)
    for step in range(5):
        tracker.log(step, {"reward/mean": 0.5})
    tracker.close()
    assert [step for step, _ in wandb.logged] == [0]
    assert wandb.calls == 3  # left alone after its failure
    assert len(warnings) == 1


def test_failure_06_tracker_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    use(monkeypatch, None)
    assert open_trackers(["wandb"], tmp_path, {}, warn=warnings.append) == []
    assert "(pip install wandb)" in warnings[0]


def test_one_tracker_down_leaves_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    wandb = FakeWandb()
    use(monkeypatch, wandb)

    def broken(folder: Path, config: Any, first_step: int) -> trackers.Tracker:
        raise OSError("disk quota")

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", broken)
    opened = open_trackers(["tensorboard", "wandb"], tmp_path, {}, warn=warnings.append)
    assert len(opened) == 1
    assert "tracker tensorboard is off: OSError: disk quota" in warnings[0]


def test_tensorboard_writes_event_files_that_can_be_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = open_trackers(["tensorboard"], tmp_path, {"seed": 1}, warn=pytest.fail)
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
