import pytest

from stoker.record.clock import PHASES
from stoker.record.metrics import METRICS, describe, undescribed

GROUPS = {"reward", "sample", "policy", "critic", "kl", "optim", "batch", "time", "eval", "memory"}


def test_every_metric_has_a_known_group_a_unit_and_a_sentence() -> None:
    for key, metric in METRICS.items():
        assert key.split("/")[0] in GROUPS, key
        assert metric.unit, key
        assert metric.meaning.endswith("."), key


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/my-format.v2/mean", "reward/{name}/mean"),
        ("reward/format/my_own_number", "reward/{name}/{logged}"),
        ("eval/gsm8k/accuracy", "eval/{name}/accuracy"),
        ("eval/gsm8k/pass@8", "eval/{name}/pass@{k}"),
        ("time/step", "time/step"),
        ("time/sample", "time/{phase}"),
    ],
)
def test_keys_find_their_meaning(key: str, pattern: str) -> None:
    assert describe(key) == METRICS[pattern]


@pytest.mark.parametrize(
    "key", ["reward/{name}/mean", "reward/a/b/mean", "time/coffee", "eval/a/pass@x", "x", "reward/meanest"]
)
def test_unknown_keys_are_found_out(key: str) -> None:
    assert describe(key) is None
    assert undescribed({"step": 1, "attempt": 1, "reward/mean": 0.0, key: 0.0}) == [key]


def test_the_clock_gives_no_phase_without_a_metric() -> None:
    assert undescribed(f"time/{phase}" for phase in PHASES) == []
