"""The fit that gives a run its micro-batch: which memory it counts on, what it says, how it fails."""

from pathlib import Path
from typing import Any

import pytest

from stoker.batch.certificate import Fit, Trial
from stoker.batch.target import Maker
from stoker.config import load as config_load
from stoker.engine import fitting
from stoker.engine.fitting import explained, fit_microbatch, host_limit
from stoker.errors import RunError
from tests.runs import found_fit, short_run


def test_the_trials_get_the_run_with_the_longest_prompt_of_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def fit(maker: Maker, **options: Any) -> Fit:
        (file,) = maker.arguments
        asked.update(options, path=maker.path, config=config_load.load(file))
        return found_fit(630)

    monkeypatch.setattr(fitting, "fit", fit)
    config = short_run(tmp_path, "update.tokens_per_microbatch=auto", "model.device=cpu")
    assert fit_microbatch(config, 9).size == 630
    task = config.task.model_copy(update={"max_prompt_tokens": 9})
    assert asked["path"] == "stoker.engine.target:make"
    assert asked["config"] == config.model_copy(update={"task": task})
    assert asked["limit_bytes"] == pytest.approx(host_limit(), rel=0.2)
    assert "MALLOC_MMAP_THRESHOLD_" not in asked["environment"]  # the run has none either: it keeps freed memory


def test_nothing_fits_is_said_with_what_to_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*_: Any, **__: Any) -> Fit:
        raise RunError("not even 63 tokens fits under 1000 bytes (MemoryError: )")

    monkeypatch.setattr(fitting, "fit", fit)
    with pytest.raises(RunError, match=r"'auto': no size was found \(not even 63 .* sampling.concurrent_samples"):
        fit_microbatch(short_run(tmp_path, "update.tokens_per_microbatch=auto"), 9)


def test_a_limit_on_the_address_space_comes_before_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "available_bytes", lambda: 1000)
    monkeypatch.setattr(fitting, "address_space_left", lambda: None)
    assert host_limit() == 900
    monkeypatch.setattr(fitting, "address_space_left", lambda: 123)
    assert host_limit() == 123


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ("memory", "700 tokens ran under 2 GiB, 707 ran out of memory; 5% of it stay free"),
        ("host memory", "707 was ended by the operating system"),
        ("deadline", "707 wasn't done within 3600 s a trial"),
        ("data", "700 tokens ran under 2 GiB, which is a whole update"),
    ],
)
def test_what_was_found_is_said_with_its_reason(bound: str, expected: str) -> None:
    text = explained(found_fit(630, bound=bound))
    assert text.startswith("update.tokens_per_microbatch = 630: ")
    assert expected in text
    assert "(2 trials in 5 s; fit.json has them all)" in text


def test_a_device_is_its_own_limit() -> None:
    assert "ran under the device's memory" in explained(found_fit(630, limit_bytes=None))


def test_a_fit_as_json_is_plain() -> None:
    found = found_fit(630)
    assert isinstance(found.trials[0], Trial)
    assert found.to_json()["trials"][0]["size"] == 707
