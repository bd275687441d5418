"""The pages of batch results: what stands in them, that nothing runs into anything, and that they load nothing."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import RunError
from stoker.report import critical as critical_pages
from stoker.report import fit as fit_pages
from stoker.report import memory, prove, scan
from stoker.report import sweep as sweep_pages
from stoker.report.html import Section, Table, page, save
from tests.report import found

PROOF: dict[str, Any] = {
    "examples": 8, "precision": "float64", "rounding": 1e-16, "tolerance": 1e-10, "weighed_by": "examples",
    "weightings": [{"name": "examples", "code": "", "weights": [0.5, 0.5], "relative": 0.31}],
    "trials": [
        {"split": {"ranks": [[4, 4]]}, "precision": "float64", "corrected": {"relative": 2e-16},
         "gaps": [{"parameter": "model.layers.0.self_attn.v_proj.weight", "absolute": 0.1, "relative": 0.31}]},
        {"split": {"ranks": [[3, 3], [2]]}, "precision": "float64", "corrected": None,
         "gaps": [{"parameter": "head.bias", "absolute": 0.0, "relative": 0.0}]},
        {"split": {"ranks": [[1] * 8]}, "precision": "float32", "corrected": None,
         "gaps": [{"parameter": "head.bias", "absolute": 1e-8, "relative": 4e-7}]},
    ],
    "causes": [{"kind": "per-microbatch mean", "place": "the loss", "relative": 0.31, "what": "a", "fix": "b"}],
    "notes": ["ranks were left out"], "equal": False, "verdict": "NOT the gradient of the whole batch",
    "largest": {"parameter": "v_proj.weight", "absolute": 0.1, "relative": 0.31},
}  # fmt: skip


def documents() -> Iterator[tuple[str, str]]:
    pages = {
        "sweep": sweep_pages.sections(found.sweep().to_json()),
        "sweep whose methods disagree": sweep_pages.sections(found.sweep(agree=False, data=False).to_json()),
        "fit": fit_pages.sections(found.fit().to_json()),
        "memory": [
            memory.breakdown(found.breakdown().to_json(), measured=27.1e9, capacity=40e9),
            memory.breakdown(found.breakdown().to_json(), capacity=26.5e9),
        ],
        "proof": prove.sections(PROOF),
        "scan": scan.sections(found.scan().to_json()),
        "critical batch": critical_pages.sections(found.critical().to_json()),
        "critical batch that was never reached": critical_pages.sections(found.critical(reached=False).to_json()),
    }
    for name, sections in pages.items():
        yield name, page(name, "today", list(sections), "as printed")


PAGES = dict(documents())


@pytest.mark.parametrize("name", PAGES)
def test_pictures_are_on_the_page_and_no_label_is_over_another(name: str) -> None:
    drawn = found.pictures(PAGES[name])
    assert drawn
    for picture in drawn:
        found.check(picture)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_one_file_without_network_or_script(name: str) -> None:
    text = PAGES[name]
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "<script" not in text
    assert not re.search(r"@import|url\(|<link|<img", text)
    assert "prefers-color-scheme: dark" in text


def test_every_colour_has_a_light_and_a_dark_value() -> None:
    used = {name for text in PAGES.values() for name in re.findall(r"var\((--\w+)\)", text)}
    for name in used:
        assert PAGES["fit"].count(f"{name}: #") == 2, name


def test_the_sweep_shows_its_points_zones_knee_and_gains() -> None:
    text = PAGES["sweep"]
    for words in (
        "Saturated from 270",
        "knee 260",
        "steep",
        "flat",
        "throughput and memory both allow",
        "+25.0%",
        "-16.7% · measured",
        "+23.0%",
    ):
        assert words in text, words
    assert text.count("<circle") >= 3 * 11  # throughput, memory, waiting
    assert "knee by the line 270" in PAGES["sweep whose methods disagree"]


def test_the_fit_shows_trials_limit_parts_and_levers() -> None:
    text = PAGES["fit"]
    for words in (
        "608 examples fit, certified",
        "out of memory",
        "limit 2.00 GiB",
        "certified 608",
        "activations",
        "Conv2d",
        "room for 280 more examples",
        "others use this host too",
        "608 x 1 x 8 x 8 float32",
        "train with MALLOC_ARENA_MAX=1",
    ):
        assert words in text, words


def test_the_breakdown_adds_up_to_what_is_expected() -> None:
    made = found.breakdown()
    row = memory._moment(made.to_json(), made.moment)
    assert sum(value for _, value in row.parts) == pytest.approx(made.expected)
    assert "4.66 GiB in the host" in PAGES["memory"]


def test_a_faulty_split_is_told_from_a_right_one() -> None:
    text = PAGES["proof"]
    assert "31.0% · at model.layers.0.self_attn.v_proj.weight" in text
    assert "2 ranks: 2 x 3 | 2" in text
    assert text.count("--rose)") >= 2  # the fault, and the line of what is one
    assert "per-microbatch mean" in text


def test_the_scan_shows_both_axes_what_diverged_and_the_rates() -> None:
    text = PAGES["scan"]
    for words in (
        "at 1,024 examples",
        "at 8 updates",
        "below: not told from the best",
        "efficiency candidate",
        "1 of 3 diverged",
        "Learning rates at 64 examples per update",
        "first seed only",
        "not told from the best",
        "lr 0.1",
    ):
        assert words in text, words


def test_hostile_names_stay_text() -> None:
    hostile = "</text></svg><script>alert(1)</script>\x1b[31m\u202e"
    made = found.fit().to_json() | {"unit": hostile, "notes": [hostile], "batch": [hostile]}
    made["largest_layer"] = {"name": hostile, "kind": hostile, "bytes_kept": 1}
    text = page(hostile, hostile, [*fit_pages.sections(made)], hostile)
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    for picture in found.pictures(text):
        assert picture.tag == f"{found.SVG}svg"


def test_a_page_that_can_not_be_written_says_so(tmp_path: Path) -> None:
    document = page("t", "s", [Section("one", table=Table(("a",), [("b",)], strong=[0]))])
    save(tmp_path / "page.html", document)
    assert (tmp_path / "page.html").read_text() == document
    with pytest.raises(RunError, match="can't be written"):
        save(tmp_path / "no" / "page.html", document)
