r"""Find the final answer in a completion: pure string work, linear in the text's length.

Forms, and what each takes for an answer:

- `boxed`      `\boxed{...}`, `\fbox{...}` with nested braces, and `\boxed 42`
- `tag`        `<answer>...</answer>`; a last tag left open reads to the end (a stop string eats the closing one)
- `hash`       a line `#### 42`
- `phrase`     "Answer: 42", "The answer is 42", "final answer = 42"; to the end of the sentence, or the next line
- `last_number` opt-in, and only where no other form matched: the last number of the text

Where several match, the one that starts last wins, whatever its form: a model that corrects itself
means its last word. Only what follows the last `</think>` is read, where there is one.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["DEFAULT_FORMS", "FORMS", "MAX_CHARACTERS", "Candidate", "candidates", "clean", "extract"]

MAX_CHARACTERS = 100_000
"""Only this much of the end of a text is searched."""
MAX_PHRASE = 300
MAX_ANSWER = 2_000

_BRACES = re.compile(r"\\(?:boxed|fbox)[ \t]{0,4}\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed[ \t]{1,4}([^\s{}$\\]{1,100})")
_TAGS = re.compile(r"<(/?)answer>", re.IGNORECASE)
_HASH = re.compile(r"^[ \t]{0,8}####(?!#)[ \t]{0,8}([^\n]{1,300})$", re.MULTILINE)
_PHRASE = re.compile(
    r"\banswer(?:\s+(?:to|for|of)\b[^.:=\n]{0,80}?)?,?[*_]{0,3}\s{0,3}"
    r"(?:\b(?:is|equals)\b(?:\s{0,3}[:=])?|[:=])[*_]{0,3}",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(
    r"[*_]{0,3}(?:correct|right|wrong|incorrect|clear|obvious|not|now|then|therefore|thus|given|found|obtained|as|in|above"
    r"|below|shown|simply|just|computed|calculated|known|unknown)\b",
    re.IGNORECASE,
)
"""What may follow "the answer is" without being one."""
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|[*_\"')]{1,3}(?:\s|$))")
_NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?")


@dataclass(frozen=True)
class Candidate:
    """One answer found: its form, where its content starts and ends in the text, and the content."""

    form: str
    start: int
    end: int
    text: str


def _boxed(text: str) -> Iterator[Candidate]:
    """One pass with a stack of open braces, so that unclosed boxes can't make the search quadratic."""
    opened: list[tuple[int, bool]] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.endswith("{") and token != r"\{":
            opened.append((match.end(), len(token) > 1))
        elif token == "}" and opened:
            start, is_box = opened.pop()
            if is_box:
                yield Candidate("boxed", start, match.start(), text[start : match.start()])
    for match in _BARE_BOX.finditer(text):
        yield Candidate("boxed", match.start(1), match.end(1), match.group(1))


def _tag(text: str) -> Iterator[Candidate]:
    start: int | None = None
    for match in _TAGS.finditer(text):
        if not match.group(1):
            start = match.end()
        elif start is not None:
            yield Candidate("tag", start, match.start(), text[start : match.start()])
            start = None
    if start is not None:
        yield Candidate("tag", start, len(text), text[start:])


def _hash(text: str) -> Iterator[Candidate]:
    for match in _HASH.finditer(text):
        content = match.group(1)
        before_digit = re.split(r"\d", content, maxsplit=1)
        is_heading = len(before_digit) == 1 or re.search(r"(?<!\\)\b[A-Za-z]{2,}", before_digit[0])
        if not is_heading:  # "#### Step 2" is Markdown, "#### 42" an answer
            yield Candidate("hash", match.start(1), match.end(1), content)


def _phrase(text: str) -> Iterator[Candidate]:
    for match in _PHRASE.finditer(text):
        start = match.end()
        while start < len(text) and text[start].isspace():  # "The answer is:\n\n$$42$$" goes on below
            start += 1
        end = text.find("\n", start, start + MAX_PHRASE)
        line = text[start : end if end >= 0 else start + MAX_PHRASE]
        stop = _SENTENCE_END.search(line)
        content = line[: stop.start()] if stop else line
        if content.strip() and not _NO_ANSWER.match(content):
            yield Candidate("phrase", start, start + len(content), content)


def _last_number(text: str) -> Iterator[Candidate]:
    for match in _NUMBER.finditer(text):
        yield Candidate("last_number", match.start(), match.end(), match.group())


FORMS = {"boxed": _boxed, "tag": _tag, "hash": _hash, "phrase": _phrase, "last_number": _last_number}
DEFAULT_FORMS = ("boxed", "tag", "hash", "phrase")


def candidates(text: str, forms: Sequence[str] = DEFAULT_FORMS, *, truncated: bool = False) -> list[Candidate]:
    """Every answer in the text, by position; with `truncated`, none that runs into the cut.

    A form that isn't in FORMS raises KeyError.
    """
    offset = max(0, len(text) - MAX_CHARACTERS)
    thought_end = text.rfind("</think>")
    body = text[max(offset, thought_end + len("</think>") if thought_end >= 0 else 0) :]
    found = [c for form in forms if form != "last_number" for c in FORMS[form](body)]
    if truncated:
        found = [c for c in found if c.end < len(body)]
    if not found and "last_number" in forms:
        found = [c for c in _last_number(body) if not (truncated and c.end == len(body))]
    return sorted(found, key=lambda c: c.start)


def extract(text: str, forms: Sequence[str] = DEFAULT_FORMS, *, truncated: bool = False) -> Candidate | None:
    """The answer that starts last, its text cleaned; None where there is none, or it is empty."""
    found = candidates(text, forms, truncated=truncated)
    if not found:
        return None
    last = found[-1]
    content = clean(last.text[:MAX_ANSWER])
    return Candidate(last.form, last.start, last.end, content) if content else None


_UNWRAP = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname|rm|boxed|fbox)\s{0,2}\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:!> ]|\\(?:left|right|displaystyle|quad|qquad|big|Big|limits)(?![A-Za-z])")
_REPLACE = (
    ("\u2212", "-"),
    ("\u2013", "-"),
    ("\ufe63", "-"),
    ("\uff0d", "-"),
    ("\u00a0", " "),
    ("\u202f", " "),
    ("\u2009", " "),
    ("\u00d7", r"\times "),
    ("\u00b7", r"\cdot "),
    ("\u03c0", r"\pi "),
    ("\u221e", r"\infty "),
    (r"\dfrac", r"\frac"),
    (r"\tfrac", r"\frac"),
    (r"\cfrac", r"\frac"),
    (r"\$", "$"),
    (r"\%", "%"),
    ("{,}", ","),
)


def clean(answer: str) -> str:
    r"""Strip what surrounds an answer without changing it: math delimiters, \text, spacing, Markdown, full stops."""
    text = answer
    for old, new in _REPLACE:
        text = text.replace(old, new)
    text = re.sub(r"(?<=\d)\\[,!](?=\d{3})", ",", text)  # 1\,000 and 1{,}000 group digits
    text = re.sub(r"(?<=[A-Za-z])~(?=[A-Za-z])", " ", text).replace("~", " ")
    text = _UNWRAP.sub(r"\1", _SPACING.sub(" ", text))
    text = _UNWRAP.sub(r"\1", text)
    before = None
    while before != text:
        before = text
        text = text.strip().strip("`").strip("*_").rstrip(".,;:!").strip()
        text = text.removeprefix("\\(").removesuffix("\\)").removeprefix("\\[").removesuffix("\\]")
        if len(text) > 1 and text[0] == text[-1] and text[0] in "$\"'":
            text = text[1:-1]
        elif text.endswith("$") and text.count("$") == 1:
            text = text[:-1]  # "Answer: $42$." was cut at its start by a bold or currency mark
    return re.sub(r"\s+", " ", text)
