import pytest

from stoker.batch.ranges import outside, remarks
from stoker.errors import ConfigError


def test_four_times_outside_is_the_edge() -> None:
    assert not outside(16, (64, 256))
    assert outside(15, (64, 256))
    assert not outside(1024, (64, 256))
    assert outside(1025, (64, 256))


@pytest.mark.parametrize(
    ("scenario", "per_device", "all_devices"),
    [
        ("classification", 15, 127),
        ("classification", 1025, 16385),
        ("detection", 1, None),
        ("nlp", 257, None),
        ("pretraining", None, 127),
        ("finetuning", None, 129),
        ("ctr", 255, None),
    ],
)
def test_each_is_worth_a_word(scenario: str, per_device: int | None, all_devices: int | None) -> None:
    said = list(remarks(scenario, per_device=per_device, all_devices=all_devices))
    assert len(said) == (per_device is not None) + (all_devices is not None)


def test_usual_sizes_are_not() -> None:
    assert list(remarks("ctr", per_device=4096, all_devices=65536)) == []
    assert list(remarks("classification", per_device=1024, all_devices=128)) == []


def test_an_unknown_scenario_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="scenario 'vision' is not known; there is: classification, detection"):
        list(remarks("vision", per_device=1))
