"""Real ranks: what they prove, and how they fail."""

import time
from pathlib import Path

import pytest

from stoker.batch.proving import prove
from stoker.batch.ranks import launch
from stoker.batch.target import Maker
from stoker.errors import RunError

MAKERS = Path(__file__).parent / "makers.py"
VICTIM = "tests.batch.rank_victim"
LATE = """
import atexit, os
from stoker.batch.ranks import run_rank
def work(job):
    if job.rank == job.numbers["bad"]:
        raise LookupError("no such table")
    return {"rank": job.rank}
atexit.register(os.abort)
run_rank(work)
"""


def test_peer_fault_02_ranks_of_10_and_1000_tokens_equal_one_rank_in_a_plain_loop() -> None:
    proof = prove(Maker(f"{MAKERS}:texts", ("right",)), size=20, splits=(10, 3), ranks=(1, 2))
    assert [str(trial.split) for trial in proof.trials] == [
        "2 x 10",
        "6 x 3 + 2",
        "2 ranks: 10 | 10",
        "2 ranks: 4 x 3 | 3 + 3 + 2",
    ]
    assert proof.equal
    assert all(trial.gaps[0].relative <= 1e-10 for trial in proof.trials)


def test_peer_fault_02_a_loop_with_counts_of_each_rank_alone_is_named() -> None:
    proof = prove(Maker(f"{MAKERS}:texts", ("own counts",)), size=20, splits=(10,))
    assert [(cause.kind, cause.place) for cause in proof.causes] == [("per-rank mean", "the loop")]
    alone, ranks = proof.trials
    assert alone.gaps[0].relative <= 1e-10
    assert ranks.gaps[0].relative > 0.05 and ranks.corrected is not None and ranks.corrected.relative <= 1e-10


def test_answers_come_in_order() -> None:
    assert launch(VICTIM, 2, {"what": ["", ""]}, {}, 60.0) == [{"rank": 0}, {"rank": 1}]


def test_a_rank_that_fails_ends_the_others_and_shows_its_error() -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match=r"(?s)rank 1 of 2 failed with exit status 1.*LookupError: no such table"):
        launch(VICTIM, 2, {"what": ["hang", "raise"]}, {}, 60.0)
    assert time.monotonic() - start < 30


def test_a_rank_that_hangs_is_ended_at_the_deadline() -> None:
    with pytest.raises(RunError, match=r"(?s)ranks 0 of 2 were not done at the deadline; raise deadline_s.*godot"):
        launch(VICTIM, 2, {"what": ["hang", ""]}, {}, 1.5)


def test_what_happens_while_the_interpreter_ends_fails_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of gloo can abort the process there, when the answer has long been left."""
    (tmp_path / "late_victim.py").write_text(LATE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert launch("late_victim", 2, {"bad": -1}, {}, 60.0) == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(RunError, match=r"(?s)rank 1 of 2 failed with exit status 1.*LookupError: no such table"):
        launch("late_victim", 2, {"bad": 1}, {}, 60.0)


def test_the_rank_that_failed_is_blamed_and_not_the_one_that_lost_it() -> None:
    """Where the other was seen to end first, its lost connection was all that was told."""
    with pytest.raises(RunError, match=r"(?s)rank 1 of 2 failed with exit status 1.*LookupError: no such table"):
        launch(VICTIM, 2, {"what": ["lost", "late"]}, {}, 60.0)
