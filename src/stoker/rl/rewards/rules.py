"""The rewards that ship: `math` (the completion's final answer) and `exact` (the whole completion).

Correct 1, wrong 0, unparsed -0.5. A truncated sample is judged like any other, but an answer that
runs into the cut doesn't count, since its end is unknown.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from stoker.errors import RewardError
from stoker.rl.rewards import numeric
from stoker.rl.rewards.answers import DEFAULT_FORMS, clean, extract
from stoker.rl.rewards.child import Child, ChildDiedError, ChildHungError
from stoker.rl.rewards.outcome import Answered, Kind, Outcome
from stoker.rl.types import Sample

__all__ = ["Exact", "Math", "Scores", "plain", "reference_answer"]

MAX_SYMBOLIC = 400
"""Longer answers are compared as text and numbers only."""


@dataclass(frozen=True)
class Scores:
    """What a rule reward pays for each verdict."""

    correct: float = 1.0
    wrong: float = 0.0
    unparsed: float = -0.5

    @property
    def range(self) -> tuple[float, float]:
        values = (self.correct, self.wrong, self.unparsed)
        return min(values), max(values)

    def outcome(self, kind: Kind, **extra: object) -> Outcome:
        value = {"correct": self.correct, "wrong": self.wrong}.get(kind, self.unparsed)
        return Outcome(value, kind, extra=extra)


def plain(text: str) -> str:
    """Text for comparison: NFKC, Unicode minus as `-`, runs of white space as one blank, trimmed."""
    return " ".join(unicodedata.normalize("NFKC", text).replace("\u2212", "-").split())


def _reference(sample: Sample, name: str) -> str:
    if sample.prompt.answer is None or not sample.prompt.answer.strip():
        raise RewardError(
            f"reward '{name}': prompt {sample.prompt.id} has no reference answer to compare with; "
            "set the source's answer_column, or leave such rows out"
        )
    return sample.prompt.answer


@dataclass(frozen=True)
class Exact:
    """The whole completion equals the reference answer, up to white space and Unicode forms."""

    name: str = "exact"
    scores: Scores = Scores()
    rule = True

    @property
    def range(self) -> tuple[float, float]:
        return self.scores.range

    def __call__(self, samples: Sequence[Sample], step: int) -> Answered:
        return Answered([self._judge(sample) for sample in samples])

    def _judge(self, sample: Sample) -> Outcome:
        reference, text = plain(_reference(sample, self.name)), plain(sample.text)
        if not text:
            return self.scores.outcome("truncated" if sample.truncated else "unparsed")
        return self.scores.outcome("correct" if text == reference else "wrong")

    def close(self) -> None:
        """Nothing is held."""


def reference_answer(text: str) -> str:
    r"""The reference itself, or the final answer of a worked solution (`... #### 42`, `... \boxed{42}`)."""
    found = extract(text, ("boxed", "hash", "tag"))
    return found.text if found else clean(text)


def _text_form(answer: str) -> str:
    """For the comparison as text: no blanks, `(B)` as `b`, case ignored where there is no LaTeX."""
    text = re.sub(r"\s+", "", answer)
    option = re.fullmatch(r"\(?([A-Za-z])[).:]?", text)
    text = option.group(1) if option else text
    return text if "\\" in text else text.casefold()


def _parts(answer: str) -> int:
    """How many candidates an answer lists: `1, 2` and `1 or 2` are two. Grouped digits don't count."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer)
    return len(re.split(r"[,;\n]|\\\\|\s(?:or|and)\s|\\(?:lor|vee|pm|mp)(?![A-Za-z])", text))


def _right_side(answer: str) -> str:
    """`x = 5` and `2 + 3 = 5` say 5."""
    return answer.rsplit("=", 1)[1].strip() if re.search(r"(?<![<>!\\])=", answer) else answer


_ARITHMETIC = re.compile(r"(?:[\d\s.,+\-*/(){}^]|\\(?:times|cdot|div|frac)(?![A-Za-z]))+")
_WORD = re.compile(r"[A-Za-z][A-Za-z ]+")


def decide(reference: str, answer: str, tolerance: float) -> bool | None:
    """Equal or not, by text and by number; None: only symbolic algebra could tell.

    Not asked of algebra, so wrong: words (`on` is not `no`, though o*n = n*o), a list of another
    length than the reference (hedging), and unevaluated arithmetic for a plain number (`12+30` for
    42 repeats the question).
    """
    if "=" not in reference:
        answer = _right_side(answer)
    if _text_form(reference) == _text_form(answer):
        return True
    wanted, found = numeric.parse(reference), numeric.parse(answer)
    if wanted and found:
        return numeric.same(wanted, found, tolerance)
    if _parts(reference) != _parts(answer) or len(answer) > MAX_SYMBOLIC or len(reference) > MAX_SYMBOLIC:
        return False
    if _WORD.fullmatch(reference) or _WORD.fullmatch(answer):
        return False
    if wanted and _ARITHMETIC.fullmatch(answer):
        return False
    return None


@dataclass
class Math:
    """The final answer equals the reference: as text, as a number, or by algebra in a child process."""

    name: str = "math"
    scores: Scores = Scores()
    forms: Sequence[str] = DEFAULT_FORMS
    tolerance: float = numeric.RELATIVE_TOLERANCE
    timeout_s: float = 10.0
    on_timeout: float | None = None
    rule = True
    _child: Child = field(default_factory=lambda: Child("stoker.rl.rewards.symbolic", inherit=False))

    @property
    def range(self) -> tuple[float, float]:
        return self.scores.range

    def __call__(self, samples: Sequence[Sample], step: int) -> Answered:
        asked: dict[tuple[str, str], Outcome] = {}  # a group often gives one answer many times
        return Answered([self._judge(sample, asked) for sample in samples])

    def _judge(self, sample: Sample, asked: dict[tuple[str, str], Outcome]) -> Outcome:
        reference = reference_answer(_reference(sample, self.name))
        found = extract(sample.text, self.forms, truncated=sample.truncated)
        if found is None:
            return self.scores.outcome("truncated" if sample.truncated else "unparsed")
        equal = decide(reference, found.text, self.tolerance)
        if equal is not None:
            return self.scores.outcome("correct" if equal else "wrong", answer=found.text)
        pair = (reference, found.text)
        if pair not in asked:
            asked[pair] = self._by_algebra(*pair)
        return asked[pair]

    def _by_algebra(self, reference: str, answer: str) -> Outcome:
        try:
            equal = self._child.ask_one({"reference": reference, "answer": answer}, self.timeout_s)["equal"]
        except (ChildHungError, ChildDiedError) as error:  # out of time, or of memory
            return Outcome(self.on_timeout, "timeout", str(error), {"answer": answer})
        return self.scores.outcome("correct" if equal else "wrong", answer=answer)

    def close(self) -> None:
        self._child.close()

    def kill(self) -> None:
        """See `workers.OwnProcess`."""
        self._child.kill()
