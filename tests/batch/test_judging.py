"""Verdicts and what they rest on, from points made by hand."""

from dataclasses import replace

import pytest

from stoker.batch import judging
from stoker.batch.curve import Fit, Knee
from stoker.batch.swept import DataShare, Point

FIT = Fit(alpha=0.1, beta=0.001)  # a knee at 450
KNEE = Knee(450, 450, True, 450.0, "")
NONE = Knee(None, None, True, None, "")


def point(size: int, **more: object) -> Point:
    seconds = FIT.seconds(size)
    return Point(size, seconds, (seconds, seconds), size / seconds, FIT.gain(size), "flat", **more)  # type: ignore[arg-type]


def waiting(share: float) -> DataShare:
    return DataShare(1.0, share, share, None)


@pytest.mark.parametrize(
    ("knee", "free_to", "ended", "share", "kind"),
    [
        (KNEE, None, "largest", 0.09, "saturated"),
        (KNEE, None, "largest", 0.11, "data-bound"),
        (Knee(450, 100, False, 100, "they differ"), None, "largest", 0.0, "undetermined"),
        (NONE, None, "memory", 0.0, "memory-limited"),
        (NONE, 64, "memory", 0.0, "memory-limited"),
        (NONE, 64, "largest", 0.0, "launch-bound"),
        (NONE, 32, "largest", 0.0, "rising"),
    ],
)
def test_what_rules(knee: Knee, free_to: int | None, ended: judging.Ended, share: float, kind: str) -> None:
    points = [point(32), point(64, data=waiting(share))]
    found = judging.judge(points, FIT, knee, free_to, ended, points[-1], "examples")
    assert found.kind == kind


def test_a_flat_curve_far_under_the_devices_limits_is_not_the_batchs_doing() -> None:
    slow, fast = (point(512, share_of_peak=share, share_of_bandwidth=0.1) for share in (0.2, 0.6))
    said = [judging.judge([p], FIT, KNEE, None, "largest", p, "examples").words for p in (slow, fast)]
    assert "uses 20% of what the device can do" in said[0]
    assert "of what the device can do" not in said[1]


def test_zones_follow_the_knee() -> None:
    assert [judging.zone_at(size, FIT, KNEE) for size in (64, 128, 449, 450)] == ["steep", "gradual", "gradual", "flat"]
    assert judging.zone_at(4096, FIT, NONE) == "gradual"


def test_the_recommended_size_is_beside_the_knee_and_fills_its_tiles() -> None:
    seconds = {256: FIT.seconds(256), 400: FIT.seconds(400) * 1.2, 448: FIT.seconds(448), 640: FIT.seconds(640)}
    assert judging.recommend(FIT, KNEE, seconds, None) == 448  # of equals the smallest; 400 is slow, 256 too far
    assert judging.recommend(FIT, KNEE, seconds, 300) == 256
    assert judging.recommend(FIT, NONE, seconds, None) is None


def test_sizes_above_the_line_fill_tiles_badly() -> None:
    seconds = {64: FIT.seconds(64), 72: FIT.seconds(72) * 1.1}
    assert judging.quantised(FIT, seconds, {64: 0.001, 72: 0.001}, [64, 72]) == [72]
    assert judging.quantised(FIT, seconds, {64: 0.001, 72: 0.05}, [64, 72]) == []  # that may be noise


def test_a_size_that_takes_as_long_as_a_larger_one_is_dominated() -> None:
    assert judging.dominated({8: 1.0, 10: 1.2, 12: 1.1, 16: 1.2, 32: 2.0}, [8, 16, 32]) == [10]


def test_memory_allows_by_the_last_two_peaks() -> None:
    """200 MB at 10, 300 MB at 20: 10 MB each; 900 MB of 1 GB allow 20 + 60."""
    assert judging.memory_allows([5, 10, 20], [None, 200, 300], 1000) == 80
    assert judging.memory_allows([10, 20], [200, 200], 1000) is None
    assert judging.memory_allows([10, 20], [200, 300], None) is None


def test_where_throughput_and_memory_both_allow() -> None:
    points = [point(256, peak_bytes=300), point(512, peak_bytes=600), point(1024, peak_bytes=950)]
    assert judging.operating(256, points, 1000) == (256, 512)
    assert judging.operating(1024, points, 1000) is None
    assert judging.operating(None, points, 1000) is None
    assert judging.operating(256, points, None) == (256, 1024)


def test_the_account_of_throughput_is_measured_and_the_others_are_not() -> None:
    points = [point(64), point(512)]
    throughput, *others = judging.accounts(points, FIT, points[0], "examples")
    assert throughput.answer == "yes"
    assert "From 64 examples, 114% more" in throughput.words  # (512 / 0.612) / (64 / 0.164) - 1
    last = judging.accounts(points, FIT, points[1], "examples")[0]
    assert last.answer == "not measured"
    assert "no larger size was measured; no size would give more than 20%" in last.words
    assert [other.answer for other in others] == ["not measured", "not measured"]


def test_a_measured_gain_above_the_lines_limit_is_not_contradicted_by_it() -> None:
    """From 32 examples "56% more was measured at 128; no size would give more than 25%" was said."""
    quick = replace(point(512), rate=2 * FIT.asymptote)
    words = judging.accounts([point(64), quick], FIT, point(64), "examples")[0].words
    assert "more throughput was measured at 512." in words
    assert "no size" not in words


def test_a_peak_left_by_a_larger_size_is_none_of_its_own() -> None:
    peaks = {1: 480, 32: 490, 48: 797, 64: 500, 96: None, 128: 520}
    assert judging.own_peaks(peaks) == {1: 480, 32: 490, 48: None, 64: 500, 96: None, 128: 520}
