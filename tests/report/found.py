"""Results to draw, small and made by hand, of the real classes; and what must hold of every picture."""

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import combinations

from stoker.batch import curve
from stoker.batch.certificate import Fit, Layer, Part, Trial
from stoker.batch.critical.branched import Branched, Rung
from stoker.batch.critical.measured import Critical
from stoker.batch.critical.reached import Reached, Steps
from stoker.batch.levers import TracedLever
from stoker.batch.loading import LoaderOptions
from stoker.batch.scanning.arms import tell_apart
from stoker.batch.scanning.deciding import conclude
from stoker.batch.scanning.efficiency import Efficiency
from stoker.batch.scanning.rate_scan import RateScan, judge
from stoker.batch.scanning.scanned import Scan
from stoker.batch.swept import Account, DataShare, Point, Remedy, Roofline, Sweep, Verdict
from stoker.memory.breakdown import MOMENTS, Breakdown, Margin, Row
from tests.batch.scanning import made as by_hand

MIB = 2**20
GOOD, GOOD_TOO, BAD = [0.50, 0.51, 0.52], [0.512, 0.513, 0.514], [0.8, 0.81, 0.82]
SVG = "{http://www.w3.org/2000/svg}"


def scan() -> Scan:
    """Throughput wants 64, of which a third of the rate ends as well; 128 diverges with one seed."""
    arms = tuple(
        by_hand.arm(size, losses, seconds=0.001 + 0.0001 * size)
        for size, losses in ((16, GOOD), (32, GOOD_TOO), (64, BAD), (128, [0.9, math.inf, 0.91]))
    )
    tried = tuple(
        by_hand.arm(64, losses, factor=factor)
        for factor, losses in ((0.25, [0.6]), (0.5, GOOD_TOO), (0.71, GOOD), (1.0, BAD), (2.0, [math.inf]))
    )
    compared = list(tried[1:4])
    rates_apart = tell_apart([arm.losses for arm in compared])
    assert rates_apart is not None
    kind, words = judge(tried, rates_apart, compared, 3)
    kept = tuple(compared[number].setting.rate_factor for number in rates_apart.kept)
    rates = RateScan(by_hand.equal(), tried, compared[rates_apart.best], rates_apart.half_width, kept, kind, words)
    apart = tell_apart([arm.losses for arm in arms])
    efficient = Efficiency(64, tuple(arm.rate for arm in arms), "a doubling gains less than 10 % from 45")
    conclusion = conclude(arms, apart, efficient, rates, "examples")
    return Scan(by_hand.equal(), arms, apart, efficient, (16, 32), rates, conclusion, ("one thing to know",))


def critical(*, reached: bool = True) -> Critical:
    """Losses that leave the tolerance between 16 and 32; steps of a curve whose critical batch is 64, or of nothing."""
    losses = {8: 1.80, 16: 1.804, 32: 1.82, 64: math.inf}
    rungs = tuple(
        Rung(size, 0.001, 1.0, ((1.0, loss),), ((1.0, loss),), (loss, loss + 0.002), ((256, loss),), 0.01)
        for size, loss in losses.items()
    )
    steps = tuple(
        Steps(size, 0.001, 2.0, ((2.0, 1000.0),), (1000 * (1 + size / 64) if reached else math.inf, math.inf), 0.01)
        for size in losses
    )
    return Critical(
        unit="windows",
        base_examples=8,
        branched=Branched("windows", 512, 256, 0.01, "held-out loss", rungs, 9_000),
        reached=Reached("windows", 2.5, 8_000, 8, steps, 50_000),
        noise=None,
    )


def sweep(*, agree: bool = True, data: bool = True) -> Sweep:
    """t = 12 ms + 0.2 ms x size at 1 to 1,024: the knee of a doubling's tenth is at 270."""
    line = curve.Fit(0.012, 0.0002, 0.0)
    points = tuple(
        Point(
            size,
            line.seconds(size),
            (0.97 * line.seconds(size), 1.05 * line.seconds(size)),
            line.rate(size),
            line.gain(size),
            curve.zone(line.gain(size)),
            peak_bytes=300 * MIB + size * 2 * MIB,
            data=DataShare(1.0, 0.3, 0.32, 10) if data else None,
            flops=600 * size,
            moved_bytes=200 * size,
        )
        for size in (2**power for power in range(11))
    )
    return Sweep(
        unit="examples", device="cpu", points=points, fit=line, gains=(),
        knee=curve.Knee(270.0, 250.0 if agree else 0.0, agree, 260.0 if agree else 270.0, "both ways"),
        launch_bound_to=None, recommended=256, operating=(256, 1024), memory_allows=1500, capacity_bytes=4096 * MIB,
        present=64, studied=64, stopped="three doublings gained nothing", drift=0.0, steady=True,
        roofline=Roofline("float32", 1.9e11, 1.2e10, 15.8), loading=LoaderOptions() if data else None,
        remedies=(
            Remedy("loader workers", "0 -> 2", 0.23, False, "fetches", 0.1, 0.08, loading=LoaderOptions(2)),
            Remedy("compile", "torch.compile", 0.5, True, "launches", 0.1, 0.12),
            Remedy("pinned memory", "", None, True, "", None, None, note="not tried: no GPU"),
        ),
        accounts=(Account("throughput", "no", "a doubling gains 4 %"), Account("noise", "not measured", "measure it")),
        verdict=Verdict("saturated", "Saturated from 270 examples."), warnings=("the device warmed up",),
    )  # fmt: skip


def fit() -> Fit:
    """Under 2,048 MiB; 628 with headroom."""

    def trial(size: int, end: str = "ran", limit: int = 2048) -> Trial:
        peak = (120 + 3 * size) * MIB if end == "ran" else None
        return Trial(size, end, 3 if end == "ran" else 0, peak, 0.1 if peak else None, 4.2, limit * MIB)

    return Fit(
        unit="examples", size=608, without_headroom=642, first_failed=643, bound="memory", steps=5,
        batch=("608 x 1 x 8 x 8 float32", "608 int64"), environment={"MALLOC_ARENA_MAX": "1"},
        limit_bytes=2048 * MIB, headroom=0.05, device="cpu", ranks=1,
        in_process=False, peak_bytes=1944 * MIB, seconds_per_step=0.31,
        trials=(
            trial(1), trial(2), trial(16), trial(128), trial(642), trial(643, "out of memory"),
            trial(609, "out of memory", 1945), trial(608, limit=1945),
        ),
        parts=(
            Part("weights", 30 * MIB, 30 * MIB), Part("gradients", 30 * MIB, 30 * MIB),
            Part("states", 60 * MIB, 60 * MIB), Part("buffers", 0, 0),
            Part("activations", 1700 * MIB, 1789 * MIB), Part("other", None, 35 * MIB),
        ),
        limiting="activations", largest_layer=Layer("features.3", "Conv2d", 512 * MIB),
        levers=(
            TracedLever("mixed precision", 800 * MIB, 280, "rounding", "torch.autocast"),
            TracedLever("half the micro-batch, accumulated twice (304 examples)", 900 * MIB, None, "passes", ""),
            TracedLever("fragmentation", None, None, "nothing", "a restart"),
        ),
        notes=("others use this host too",),
    )  # fmt: skip


def breakdown() -> Breakdown:
    loss, begins, ends, *_, step = MOMENTS
    rows = (
        Row("weights", 5e9), Row("optimizer states", 10e9), Row("gradients", 5e9, (ends, step)),
        Row("16-bit copies of weights", 2.5e9, (loss, begins), note="made by autocast"),
        Row("activations", 3.2e9, (loss, begins), 1.6e9), Row("logits", 6.3e9, (loss,), 3.1e9, note="with gradients"),
        Row("one layer's backward pass", 0.4e9, (begins, ends), 0.2e9), Row("ids", 1e4, MOMENTS, 5e3),
        Row("master weights", 5e9, host=True),
    )  # fmt: skip
    return Breakdown("llama, autocast, adamw", 2, rows, Margin(0.02, 2e8))


def pictures(document: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", document, re.DOTALL)]


def check(picture: ElementTree.Element) -> None:
    """Well-formed, everything on the page, and no two labels over one another."""
    width, height = (float(n) for n in picture.attrib["viewBox"].split()[2:])
    for box in boxes(picture):
        assert box[0] >= -1, (box, "left of the picture")
        assert box[2] <= width + 1, (box, "right of the picture")
        assert 0 <= box[3] <= height + 4, (box, "below the picture")
    for rect in picture.iter(f"{SVG}rect"):
        assert float(rect.attrib["width"]) >= 0
        assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width + 1
    for path in picture.iter(f"{SVG}path"):
        for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", path.attrib["d"]):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height
    for (*a, one), (*b, other) in combinations(boxes(picture), 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, f"'{one}' over '{other}'"


def boxes(picture: ElementTree.Element) -> Iterator[tuple[float, float, float, float, str]]:
    """Of each text: left, top, right, bottom, at 5.9 px a character, a little less than the widest fonts take."""
    for text in picture.iter(f"{SVG}text"):
        said = text.text or ""
        if not said:
            continue
        wide, x, y = 5.9 * len(said), float(text.attrib["x"]), float(text.attrib["y"])
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[text.attrib["text-anchor"]]
        yield left, y - 9, left + wide, y + 2, said
