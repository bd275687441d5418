import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.record.curve import Panel, Series, number, smooth, sparkline, svg, text_plot, ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_a_sparkline_spans_its_range() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([3, 3, 3], 8) == "▄▄▄"
    assert sparkline([math.nan, 1, 2], 8) == "▁█"
    assert sparkline([], 8) == ""


def test_smoothing_is_a_centred_mean() -> None:
    points = [(0, 0.0), (1, 3.0), (2, 6.0), (3, 0.0)]
    assert smooth(points, 3) == [(0, 1.5), (1, 3.0), (2, 3.0), (3, 3.0)]
    assert smooth(points, 1) == points


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_ticks_are_round_inside_and_about_as_many_as_asked(low: float, width: float, count: int) -> None:
    marks = ticks(low, low + width, count)
    assert len(marks) <= count + 1
    assert all(low - 1e-6 * width <= mark <= low + width + 1e-6 * width for mark in marks)
    assert len(marks) >= count // 3


def test_ticks_by_hand() -> None:
    assert ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(-0.2, 0.83, 5) == [0, 0.25, 0.5, 0.75]
    assert ticks(3, 3, 5) == [3]


def test_numbers_are_short() -> None:
    assert [number(x) for x in (0, 0.25, 1500, 12_000, 2.5e6, -3e9)] == ["0", "0.25", "1500", "12k", "2.5M", "-3G"]


def test_a_text_plot_has_its_axes_and_a_rising_line() -> None:
    plot = text_plot([(0, 0.2), (10, 0.8)], title="held-out", x_title="step", width=20, height=5)
    lines = plot.split("\n")
    assert lines[0].strip() == "held-out"
    assert lines[1].startswith("0.8 ┤")
    assert lines[5].startswith("0.2 ┤")
    assert lines[7].split() == ["0", "step", "10"]
    first_dots = [re.search("[\u2801-\u28ff]", line) for line in lines[1:6]]
    starts = [match.start() for match in first_dots if match]
    assert starts == sorted(starts, reverse=True)
    assert len(starts) == 5


@pytest.mark.parametrize("points", [[(1, 0.5)], [(1, 0.5), (2, 0.5)], [(1, math.nan), (2, 1.0)]])
def test_a_text_plot_of_little_data_still_draws(points: list) -> None:
    assert re.search("[\u2801-\u28ff]", text_plot(points, title="t", x_title="step"))


def test_a_text_plot_of_nothing_says_so() -> None:
    assert text_plot([(1, math.nan)], title="t", x_title="step") == "t: nothing to show"


def picture() -> ElementTree.Element:
    accuracy = Series("accuracy", [(0, 0.2), (50, 0.5), (100, 0.75)], errors=[0.02, 0.03, 0.02], markers=True)
    raw = Series("raw", [(i, (i % 7) / 7) for i in range(1, 101)], faint=True)
    panels = [Panel("Held-out accuracy", [accuracy], percent=True), Panel("Reward", [raw]), Panel("Empty", [])]
    return ElementTree.fromstring(svg("run", panels, subtitle="200 steps"))


def test_the_picture_is_xml_with_its_lines_inside_the_page() -> None:
    root = picture()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    paths = [path.attrib["d"] for path in root.iter(f"{SVG}path")]
    assert len(paths) == 3  # band, accuracy, raw reward
    for path in paths:
        for x, y in re.findall(r"([\d.-]+),([\d.-]+)", path):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height


def test_the_picture_labels_its_end_and_says_where_nothing_was_recorded() -> None:
    texts = [text.text for text in picture().iter(f"{SVG}text")]
    assert "75.0 %" in texts
    assert "nothing recorded" in texts
    assert {"run", "200 steps", "Held-out accuracy", "step"} <= set(texts)


def test_points_land_where_the_axes_say() -> None:
    root = ElementTree.fromstring(svg("t", [Panel("p", [Series("s", [(0, 0), (10, 1)])], y_range=(0, 1))]))
    path = next(path for path in root.iter(f"{SVG}path") if path.attrib["class"] == "line").attrib["d"]
    (x0, y0), (x1, y1) = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path)]
    labels = {text.text: text.attrib for text in root.iter(f"{SVG}text")}
    assert float(labels["0"]["x"]) == x0  # the x axis comes last
    assert float(labels["10"]["x"]) == x1
    assert float(labels["1"]["y"]) - 4 == y1 or float(labels["1"]["x"]) < x0
    assert y0 > y1


def test_noise_on_a_steady_line_stays_small() -> None:
    def height(least_span: float) -> float:
        panel = Panel("p", [Series("s", [(0, 9.9), (10, 10)])], least_span=least_span)
        path = next(
            p for p in ElementTree.fromstring(svg("t", [panel])).iter(f"{SVG}path") if p.attrib["class"] == "line"
        )
        (_, y0), (_, y1) = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path.attrib["d"])]
        return y0 - y1

    # The line fills 1 / 1.16 of a free axis, and 0.1 of one that must span 0.1 x 10.
    assert height(0.1) / height(0.0) == pytest.approx(0.1 * 1.16, rel=0.02)


def test_failure_36_hostile_names_in_the_picture() -> None:
    hostile = "</text><script>alert(1)</script>\x1b[31m"
    text = svg(
        hostile, [Panel(hostile, [Series("s", [(0, 1)], color='"/><script>')])], subtitle=hostile, x_title=hostile
    )
    root = ElementTree.fromstring(text)
    assert not list(root.iter(f"{SVG}script"))
    assert "\x1b" not in text
