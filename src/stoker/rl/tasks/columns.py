"""Which column is the prompt and which the answer, in the schemas of TRL, verl, OpenRLHF and verifiers."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.config.task import Data
from stoker.errors import DataError
from stoker.rl.tasks.files import BadRow, RawRow
from stoker.rl.types import Message

__all__ = ["ANSWER_COLUMNS", "PROMPT_COLUMNS", "Columns", "Row", "find_columns", "parse_rows"]

PROMPT_COLUMNS = ("prompt", "input", "question", "problem")
"""TRL and verl; OpenRLHF; verifiers; mathematics sets. The first that is there is taken."""
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "solution", "label", "ground_truth", "completion")
"""verl; verifiers and TRL; TRL; OpenRLHF; others; TRL with supervised data."""


@dataclass(frozen=True)
class Row:
    """One usable row, before tokenising."""

    id: str
    """`source:index`, the index counting every row of the source, unusable ones too."""
    source: str
    place: str
    content: str | tuple[Message, ...]
    answer: str | None
    columns: Mapping[str, Any]
    """Every column but the prompt: reward functions may ask for any by name."""


@dataclass(frozen=True)
class Columns:
    """Where a source keeps prompt and answer; dots step into nested columns."""

    prompt: str
    answer: str | None


def _lookup(columns: Mapping[str, Any], path: str) -> Any:
    """The value at a column name, or at a dotted path into nested columns; None where there is none."""
    if path in columns:
        return columns[path]
    value: Any = columns
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def find_columns(source: Data, name: str, rows: Sequence[RawRow], needs_answer: bool) -> Columns:
    """The first alias with a value in any row. Raises DataError with the columns found and the aliases tried."""
    prompt = _first(rows, [source.prompt_column] if source.prompt_column else PROMPT_COLUMNS)
    answer = _first(rows, [source.answer_column] if source.answer_column else ANSWER_COLUMNS)
    found = ", ".join(sorted({str(column) for row in rows for column in row.columns}))
    if prompt is None:
        tried = source.prompt_column or ", ".join(PROMPT_COLUMNS)
        raise DataError(
            f"task source '{name}' has no prompt column: found {found}; tried {tried}. Set the source's `prompt_column`"
        )
    if answer is None and (needs_answer or source.answer_column):
        tried = source.answer_column or ", ".join(ANSWER_COLUMNS)
        raise DataError(
            f"task source '{name}' has no answer column, which the run's rewards or warm start need: "
            f"found {found}; tried {tried}. Set the source's `answer_column`"
        )
    return Columns(prompt, answer)


def _first(rows: Sequence[RawRow], paths: Iterable[str]) -> str | None:
    return next((path for path in paths if any(_lookup(row.columns, path) is not None for row in rows)), None)


def parse_rows(
    source: Data, name: str, raw: Iterable[RawRow | BadRow], needs_answer: bool
) -> tuple[list[Row], list[BadRow], Columns]:
    """Usable rows in order, the malformed ones, and the columns chosen."""
    indexed = list(enumerate(raw))
    bad = [row for _, row in indexed if isinstance(row, BadRow)]
    good = [(index, row) for index, row in indexed if isinstance(row, RawRow)]
    if not good:
        why = f" (all {len(bad)} are malformed: {bad[0].place}: {bad[0].reason})" if bad else ""
        raise DataError(f"task source '{name}' ({source.path}) has no rows{why}")
    columns = find_columns(source, name, [row for _, row in good], needs_answer)
    rows = []
    for index, row in good:
        try:
            rows.append(_parse(f"{name}:{index}", name, row, columns, needs_answer))
        except ValueError as error:
            bad.append(BadRow(row.place, str(error)))
    return rows, bad, columns


def _parse(row_id: str, source: str, raw: RawRow, columns: Columns, needs_answer: bool) -> Row:
    content = _content(_lookup(raw.columns, columns.prompt), columns.prompt)
    answer = _answer(_lookup(raw.columns, columns.answer)) if columns.answer else None
    if needs_answer and not (answer or "").strip():
        raise ValueError(f"no answer in column '{columns.answer}'")
    try:
        f"{content}{answer}".encode()
    except UnicodeEncodeError:
        raise ValueError("its prompt or answer holds half a surrogate pair, which is not valid Unicode") from None
    others = {name: value for name, value in raw.columns.items() if name != columns.prompt}
    return Row(row_id, source, raw.place, content, answer, others)


def _content(value: Any, column: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"empty prompt in column '{column}'")
        return value
    if isinstance(value, list) and value:
        return tuple(_message(message, column) for message in value)
    kind = "nothing" if value is None or value == [] else f"a {type(value).__name__}"
    raise ValueError(f"column '{column}' holds {kind}, not a string or a list of messages")


def _message(value: Any, column: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise ValueError(f"column '{column}' holds a message without a `role`: {str(value)[:80]}")
    if not isinstance(value.get("content"), str):
        raise ValueError(f"column '{column}' holds a message whose `content` is not text: {str(value)[:80]}")
    return {key: item for key, item in value.items() if item is not None}  # Arrow fills absent keys with None


def _answer(value: Any) -> str | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():  # integers of a column with gaps arrive as floats
        return str(int(value))
    if isinstance(value, list) and value and isinstance(value[-1], Mapping) and "content" in value[-1]:
        return _answer(value[-1]["content"])  # TRL: a conversational completion
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (list, dict)) else str(value)
