"""The page of a search: every trial is on the map, and nothing runs into anything."""

import json
import re

import pytest

from stoker.batch.searching.searched import End, Searched, Trial
from stoker.batch.searching.space import Space
from stoker.batch.trainings.setting import Setting
from stoker.report import search
from stoker.report.html import page
from tests.report import found

PRESENT, SPACE = Setting(64), Space((16, 64, 128, 256, 1024))


def trial(number: int, size: int, factor: float, end: End = "complete", loss: float | None = 0.5) -> Trial:
    samples = 1000 if end == "complete" else 300
    return Trial(number, Setting(size, base_examples=64, rate_factor=factor), end, loss, samples, 1.5, ())


def searched(*trials: Trial) -> Searched:
    return Searched("images", 1000, 4, PRESENT, SPACE, trials, {"batch": 0.7, "rate_factor": 0.3}, 0, "study.db")


SEVERAL = searched(
    trial(0, 64, 1.0, loss=0.4),
    trial(1, 16, 0.1),
    trial(2, 1024, 8.0, "pruned", 2.0),
    trial(3, 256, 9.7, "diverged", None),
    trial(4, 128, 2.3, loss=0.31),
    trial(5, 256, 3.3, loss=0.35),
)


def document(made: Searched) -> str:
    return page("Search", "today", list(search.sections(json.loads(json.dumps(made.to_json())))), str(made))


@pytest.mark.parametrize(
    "made",
    [
        SEVERAL,
        searched(trial(0, 64, 1.0)),
        searched(trial(0, 64, 1.0, "diverged", None), trial(1, 64, 3.0, "diverged", None)),
        searched(trial(0, 16, 1.0), trial(1, 1024, 1.3)),
    ],
    ids=["several", "one", "all diverged", "edges"],
)
def test_pictures_are_sound_and_every_trial_is_on_the_map(made: Searched) -> None:
    drawn = found.pictures(document(made))
    assert len(drawn) == 1 + (made.best is not None)
    for picture in drawn:
        found.check(picture)
    titles = re.findall(r"<title>trial (\d+):", document(made))
    assert sorted(map(int, titles)) == [each.number for each in made.trials]


def test_the_verdict_and_the_table_lead_with_the_best() -> None:
    written = document(SEVERAL)
    assert "Best of 6: 128 images per update at 2.3 x the learning rate that follows from 64" in written
    assert "-22.5%" in written  # 0.31 over 0.4
    first = re.search(r'<tr class="strong">\s*<td>(\d+)', written)
    assert first is not None and first[1] == "4"
    assert "ending early saved 23%" in written  # 1,400 of 6,000
    assert "best tenth: batch 70%, rate factor 30%" in written
    assert "best: 0.31" in written
