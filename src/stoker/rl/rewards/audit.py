"""Audit a reward before training: it must rank answers whose worth is known.

For rows of the task, known right, wrong, unparsable and gamed answers are built and scored by all
rewards together, as training would. What must hold: right > wrong >= unparsable, and right > every
gamed answer (repeating the right answer may equal it). A function's answer form isn't known, so the
answers are written in the form for which the right ones score highest. What a warm start teaches, the
reference as it is, must count as right too, or RL would punish what was taught.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stoker.rl.rewards import numeric
from stoker.rl.rewards.adapters import prompt_text
from stoker.rl.rewards.rules import plain, reference_answer
from stoker.rl.types import Prompt, Sample, SamplingParams

__all__ = ["FORMATS", "AuditLine", "run"]

TAUGHT = "as the warm start teaches it"
FORMATS: Mapping[str, str] = {
    "boxed": "\\boxed{%s}",
    "plain": "%s",
    "hash": "#### %s",
    "tag": "<answer>%s</answer>",
    "phrase": "The answer is %s.",
    "thought": "<think>\nSo it follows.\n</think>\n<answer>%s</answer>",
}
Kind = Literal["right", "wrong", "unparsable", "gamed"]


@dataclass(frozen=True)
class AuditLine:
    """One answer whose worth is known, its score, and whether the score is where it must be."""

    kind: Kind
    text: str
    score: float | None
    """Weighted sum of all rewards; None: all abstained."""
    ok: bool
    prompt_id: str = ""
    trick: str = ""
    """What a gamed answer tries, or how a right one is written."""


def _wrong(answer: str, others: Sequence[str]) -> str:
    number = numeric.parse(answer)
    if number is not None and number.value.denominator == 1:
        return str(number.value + 1)
    differing = [other for other in others if plain(other).casefold() != plain(answer).casefold()]
    return differing[0] if differing else f"{answer} + 1"


def _sample(prompt: Prompt, index: int, text: str) -> Sample:
    """A finished sample with one made-up token a word: the audit needs no tokenizer."""
    length = max(1, len(text.split()))
    return Sample(
        prompt=prompt,
        index=index,
        params=SamplingParams(max_new_tokens=max(256, length)),
        weight_version=0,
        token_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        text=text,
        finish="stop",
    )


def _cases(prompt: Prompt, right: str, wrong: str, form: str, taught: bool) -> list[tuple[Kind, str, str]]:
    """(kind, trick, text). No gamed answer ends in the right one alone."""

    def write(answer: str) -> str:
        return form % answer

    listed = ", ".join(dict.fromkeys([wrong, right, *map(str, range(1, 10))]))
    as_taught: list[tuple[Kind, str, str]] = [("right", TAUGHT, prompt.answer or "")] if taught else []
    return [
        ("right", "", write(right)),
        *as_taught,
        ("wrong", "", write(wrong)),
        ("unparsable", "", ""),
        ("unparsable", "", "I am not sure what is asked here"),
        ("gamed", "lists candidates in one answer", write(listed)),
        ("gamed", "two candidates in one answer", write(f"{right} or {wrong}")),
        ("gamed", "several answers, the last wrong", " ".join(write(x) for x in (right, wrong, right, wrong))),
        ("gamed", "repeats a wrong answer", " ".join([write(wrong)] * 20)),
        ("gamed", "repeats the right answer", " ".join([write(right)] * 20)),
        ("gamed", "echoes the prompt", prompt_text(prompt.content)),
        ("gamed", "echoes the prompt as the answer", write(prompt_text(prompt.content))),
        ("gamed", "empty answer", write("")),
    ]


def _ok(kind: Kind, trick: str, score: float | None, scores: Mapping[str, Sequence[float]]) -> bool:
    if score is None:
        return kind in ("unparsable", "gamed")  # an abstention rewards nothing
    right, wrong, unparsable = scores["right"], scores["wrong"], scores["unparsable"]
    if kind == "right":
        return all(score > other for other in wrong)
    if not right:
        return False
    if kind == "wrong":
        return score < min(right) and all(score >= other for other in unparsable)
    if kind == "unparsable":
        return score < min(right) and all(score <= other for other in wrong)
    return score <= min(right) if trick == "repeats the right answer" else score < min(right)


def _best_form(score: Callable[[Sequence[Sample]], list[float | None]], rows: Sequence[tuple[Prompt, str]]) -> str:
    """The form in which right answers score highest, the first of equals."""
    samples = [_sample(prompt, 0, form % right) for form in FORMATS.values() for prompt, right in rows]
    values = score(samples)
    means = {}
    for i, form in enumerate(FORMATS.values()):
        found = [value for value in values[i * len(rows) : (i + 1) * len(rows)] if value is not None]
        means[form] = sum(found) / len(found) if found else float("-inf")
    return max(means, key=means.__getitem__)


def run(
    score: Callable[[Sequence[Sample]], list[float | None]], prompts: Sequence[Prompt], rows: int, taught: bool = False
) -> list[AuditLine]:
    """Audit `score` on the first `rows` prompts with a reference answer; no lines where none has one.

    `taught`: a warm start teaches the references as they are.
    """
    known = [(p, reference_answer(p.answer)) for p in prompts if p.answer and p.answer.strip()][:rows]
    if not known:
        return []
    form = _best_form(score, known)
    answers = [right for _, right in known]
    lines: list[AuditLine] = []
    for prompt, right in known:
        cases = _cases(prompt, right, _wrong(right, answers), form, taught)
        values = score([_sample(prompt, i, text) for i, (_, _, text) in enumerate(cases)])
        scores = {
            kind: [v for (k, t, _), v in zip(cases, values, strict=True) if k == kind and t != TAUGHT and v is not None]
            for kind in ("right", "wrong", "unparsable")
        }
        for (kind, trick, text), value in zip(cases, values, strict=True):
            lines.append(AuditLine(kind, text, value, _ok(kind, trick, value, scores), prompt.id, trick))
    return lines
