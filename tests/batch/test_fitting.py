"""The whole of a fit: on simulated memory, in this process, and once in processes of its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stoker.batch.agreement import Agreement
from stoker.batch.fitting import Fit, _Fitting, fit
from stoker.batch.search import Search
from stoker.batch.target import Maker, Target
from stoker.batch.trials import Ending
from stoker.errors import ConfigError, RunError

TARGETS = str(Path(__file__).with_name("fit_targets.py"))
MIB = 2**20


class Device:
    """100 bytes and 10 for each example; fails as told."""

    def __init__(self, fails: Callable[[int, int], str | None] = lambda size, trial: None, *, blind: bool = False):
        self.fails, self.blind, self.tried = fails, blind, []
        self.environment = {"MALLOC_ARENA_MAX": "1"}

    def try_size(self, size: int, limit_bytes: int | None, steps: int | None = None) -> Ending:
        self.tried.append((size, limit_bytes, steps or 3))
        peak = 100 + 10 * size
        end = self.fails(size, len(self.tried)) or ("out of memory" if peak > (limit_bytes or 1000) else "ran")
        if end != "ran":
            return Ending(end, {}, end, "")
        told = {"peak_bytes": None if self.blind else peak, "seconds_per_step": 0.1 * size, "steps": steps or 3}
        return Ending(
            end, told | {"elements": size * 7, "batch": [f"{size} x 7 float32"], "parts": {"weights": 60}}, "", ""
        )


def fitted(device: Device, *, limit: int | None = 1000, headroom: float = 0.0, **search: Any) -> Fit:
    found = {
        "unit": "examples",
        "device": "cpu",
        "trace": None,
        "untraced": "a simulation",
        "capacity_bytes": 1000,
        "least": 1,
    }
    seek = Search(**{"limit_bytes": limit or 1000} | search)
    return _Fitting(device, found, seek, limit, headroom, 1, False, Agreement()).certified()


def test_exact_and_certified_by_a_trial_after_the_search() -> None:
    device = Device()
    found = fitted(device)
    assert (found.size, found.without_headroom, found.first_failed, found.bound) == (90, 90, 91, "memory")
    assert device.tried[-1] == (90, 1000, 5)
    assert (found.trials[-1].size, found.trials[-1].steps, found.steps) == (90, 5, 5)
    assert found.batch == ("90 x 7 float32",)


@pytest.mark.parametrize("blind", [False, True])
def test_headroom_is_left_of_the_limit_and_run_under_it(blind: bool) -> None:
    device = Device(blind=blind)
    found = fitted(device, headroom=0.1)
    assert (found.size, found.without_headroom) == (80, 90)
    assert device.tried[-1] == (80, 900, 5)
    if not blind:
        assert len(found.trials) <= 8  # what the first search saw isn't tried again


def test_a_device_that_is_its_own_limit() -> None:
    assert fitted(Device(), limit=None).size == 90
    assert fitted(Device(), limit=None, headroom=0.1).size == 80


def test_peer_fault_25_no_result_that_never_ran() -> None:
    """What ran once and fails when run again isn't certified, and neither is a size that only the slope suggests."""
    ran: list[int] = []

    def fails(size: int, trial: int) -> str | None:
        again = size >= 60 and size in ran
        ran.append(size)
        return "out of memory" if again else None

    device = Device(fails)
    found = fitted(device)
    assert found.size < 60
    assert (found.size, 1000, 5) in device.tried
    assert found.without_headroom == found.size < found.first_failed
    assert found.trials[-1].ran and found.trials[-1].size == found.size


def test_peaks_that_differ_from_process_to_process_take_more_runs_to_certify() -> None:
    class Unsteady(Device):
        def try_size(self, *arguments: Any) -> Ending:
            ending = super().try_size(*arguments)
            if "peak_bytes" in ending.told:
                ending.told["peak_bytes"] += 20 * (len(self.tried) % 2)
            return ending

    device = Unsteady()
    found = fitted(device)
    assert [steps for size, _, steps in device.tried if size == found.size].count(5) > 1
    assert found.peak_bytes == max(one.peak_bytes for one in found.trials if one.size == found.size)
    assert "not steady" in found.notes[0]


@pytest.mark.parametrize(("headroom", "runs"), [(0.05, 1), (0.0, 4)])
def test_a_size_that_leaves_next_to_nothing_free_takes_more_runs_to_certify(headroom: float, runs: int) -> None:
    assert len([one for one in fitted(Device(), headroom=headroom).trials if one.steps == 5]) == runs


def test_peer_fault_25_larger_than_the_data_set_is_never_tried() -> None:
    device = Device()
    found = fitted(device, most=50)
    assert (found.size, found.bound, found.first_failed) == (50, "data", None)
    assert max(size for size, *_ in device.tried) == 50
    assert "the data set has no more" in str(found)


def test_peer_fault_25_the_hosts_memory_is_named() -> None:
    found = fitted(Device(lambda size, _: "killed" if size > 20 else None))
    assert (found.size, found.bound) == (20, "host memory")
    assert "fewer loader workers" in found.notes[-1]
    assert "21 was killed by the operating system" in str(found)


def test_a_deadline_is_no_lack_of_memory() -> None:
    found = fitted(Device(lambda size, _: "deadline" if size > 20 else None))
    assert (found.size, found.bound) == (20, "deadline")
    assert "larger ones may fit" in str(found)


def test_nothing_fits() -> None:
    with pytest.raises(RunError, match="not even 1 examples fits under 105 bytes"):
        fitted(Device(), limit=105)
    with pytest.raises(RunError, match="its peak is above that"):
        fitted(Device(), limit=115, headroom=0.1, most=1)


def test_peer_fault_25_batches_that_stop_growing_are_refused() -> None:
    class Stops(Device):
        def try_size(self, *arguments: Any) -> Ending:
            ending = super().try_size(*arguments)
            return Ending("ran", ending.told | {"elements": min(ending.told["elements"], 28)}, "", "")

    with pytest.raises(RunError, match="make_batch gave 28 numbers for"):
        fitted(Stops())


def test_peer_fault_25_accumulation_keeps_the_update_and_so_the_learning_rate() -> None:
    found = fitted(Device(), headroom=0.1)  # 80 fit
    assert (found.for_update(256).accumulation_steps, found.for_update(256).examples_per_microbatch) == (4, 64)
    assert found.for_update(80).accumulation_steps == 1
    assert found.for_update(81).examples_per_microbatch == 41
    assert found.for_update(256).examples_per_update == 256
    assert "so is the learning rate" in str(found.for_update(256))
    with pytest.raises(ConfigError, match="less than one"):
        found.for_update(0)


def test_the_certificate_in_both_forms() -> None:
    found = fitted(Device(), headroom=0.1)
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["size"] == 80
    assert [trial["size"] for trial in plain["trials"]] == [trial.size for trial in found.trials]
    assert {part["name"]: part["measured"] for part in plain["parts"]} == {
        "weights": 60, "gradients": None, "states": None, "buffers": None, "activations": 800, "other": 40
    }  # fmt: skip
    text = str(found)
    for expected in (
        "80 examples fit on cpu, certified: 5 complete",
        "10% kept free",
        "without headroom  90",
        "91 ran out",
    ):
        assert expected in text
    assert "limiting part     activations" in text


def small(capacity: int = 37, most: int | None = None) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if len(x) > capacity:
            raise MemoryError
        result: Tensor = model(x).square().mean()
        return result

    return Target(model, torch.optim.AdamW(model.parameters()), lambda size: torch.zeros(size, 4), loss, most=most)


def test_in_process() -> None:
    made = small()
    found = fit(made, in_process=True, headroom=0.0)
    assert (found.size, found.first_failed, found.in_process, found.steps) == (37, 38, True, 5)
    assert found.largest_layer is not None
    assert made.optimizer.state == {}
    assert [lever.name for lever in found.levers][-1] == "optimizer offload"
    weights = sum(p.nbytes for p in made.model.parameters())
    parts = {part.name: part for part in found.parts}
    assert parts["weights"].measured == parts["weights"].predicted == weights
    assert parts["gradients"].measured == parts["gradients"].predicted == weights
    assert parts["states"].predicted == 2 * weights
    assert parts["states"].measured == 2 * weights + 4 * 4  # and a step count for each of four weights


def test_a_training_that_refuses_one_example_is_told_to_begin_with_two() -> None:
    made = small(capacity=8)
    made.model.append(nn.BatchNorm1d(1, affine=False))
    with pytest.raises(RunError, match="more than 1 value per channel") as caught:
        fit(made, in_process=True, headroom=0.0)
    assert "start = 2 (--start 2)" in caught.value.__notes__[0]
    assert fit(made, in_process=True, headroom=0.0, start=2).size == 8


def test_a_start_beyond_the_data_set_begins_at_its_end() -> None:
    assert fit(small(most=5), in_process=True, headroom=0.0, start=64).size == 5
    assert fit(small(), in_process=True, headroom=0.0, most=9).size == 9


def test_peer_fault_25_a_checkpoint_brings_no_old_size_back() -> None:
    """A size belongs to a certificate; neither model nor optimizer knows of it, so that no resume restores it."""
    before, after = small(capacity=8), small(capacity=37)
    assert fit(before, in_process=True, headroom=0.0).size == 8
    saved = {"model": before.model.state_dict(), "optimizer": before.optimizer.state_dict()}
    after.model.load_state_dict(saved["model"])
    after.optimizer.load_state_dict(saved["optimizer"])
    assert fit(after, in_process=True, headroom=0.0).size == 37


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"headroom": 1.0}, "headroom is a share"),
        ({"steps": 1}, "at least 2 steps"),
        ({"start": 0}, "begin at 1"),
        ({"in_process": False}, "makes a target of its own"),
        ({"ranks": 2}, "one process is one rank"),
    ],
)
def test_arguments_that_do_not_fit_together(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        fit(small(), **{"in_process": True} | change)
    with pytest.raises(ConfigError, match="needs a Target that is in this process"):
        fit(Maker("x.py:y"), in_process=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux")
def test_in_processes_of_its_own_under_a_real_limit() -> None:
    found = fit(f"{TARGETS}:plain", limit_bytes=300 * MIB, headroom=0.05, start=16)
    assert found.bound == "memory"
    assert found.size < found.without_headroom < found.first_failed
    assert found.peak_bytes <= 0.95 * 300 * MIB
    assert found.trials[-1].size == found.size and found.trials[-1].steps == 5
    assert found.batch == (f"{found.size} x 262144 float32",)
    assert found.environment["MALLOC_ARENA_MAX"] == "1"


RANK = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[3])
import fit_targets
from stoker.batch.fitting import fit
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
target = fit_targets.capacity(("11", "5")[rank]) if sys.argv[4] == "capacity" else (
    fit_targets.capacity("9") if rank == 0 else fit_targets.broken("4"))
target.make_batch = lambda size: torch.zeros(size, 8)
try:
    found = fit(target, in_process=True, headroom=0.0)
    print(found.size, found.ranks, found.for_update(40).accumulation_steps)
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0])
dist.destroy_process_group()
"""


def both_ranks(folder: Path, what: str) -> list[str]:
    script = folder / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder / "meeting"), str(Path(TARGETS).parent), what],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    return [process.communicate(timeout=60)[0].strip() for process in started]


def test_peer_fault_25_ranks_agree_on_the_smallest(tmp_path: Path) -> None:
    assert both_ranks(tmp_path, "capacity") == ["5 2 4", "5 2 4"]


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    first, second = both_ranks(tmp_path, "broken")
    assert first == "RunError a trial, or the making of its target, failed on rank 1: see the error there"
    assert second == "RuntimeError mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"
