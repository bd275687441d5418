"""The task of a run, ready for the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.config.schema import RunConfig
from stoker.errors import DataError
from stoker.rl.tasks.columns import Row
from stoker.rl.tasks.encode import context_limit, encode_rows, special_token_notes
from stoker.rl.tasks.read import TaskRows, check_enough, listing, read_rows
from stoker.rl.tasks.sources import name_of
from stoker.rl.tasks.stream import PromptStream
from stoker.rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TaskData", "load"]


@dataclass(frozen=True)
class TaskData:
    """Training prompts as a stream, validation prompts by set."""

    train: PromptStream
    validation: dict[str, list[Prompt]]
    notes: list[str]
    """What the user should know of the data, one line each."""


def load(config: RunConfig, tokenizer: "PreTrainedTokenizerBase", rows: TaskRows | None = None) -> TaskData:
    """Tokenise the task. `rows` are those of an earlier `read_rows(config)`, so that nothing is read twice."""
    rows = rows or read_rows(config)
    notes = [*rows.notes, *special_token_notes(config, tokenizer)]
    train: dict[str, list[Prompt]] = {}
    for name, found in rows.train.items():
        train[name] = _prompts(found, config, tokenizer, notes)
    check_enough(train, config.task.sources, config.schedule.most(config.sampling.prompts_per_step))
    validation = {name: _prompts(found, config, tokenizer, notes) for name, found in rows.validation.items()}
    weights = {name_of(source): source.weight for source in config.task.sources}
    stream = PromptStream(train, weights, seed=config.seed, shuffle=config.task.shuffle)
    return TaskData(stream, validation, notes)


def _prompts(
    rows: Sequence[Row], config: RunConfig, tokenizer: "PreTrainedTokenizerBase", notes: list[str]
) -> list[Prompt]:
    """Prompts of the rows that fit; rows that don't are listed, and stop the run or are left out."""
    limit, reason = context_limit(config, tokenizer)
    encoded = encode_rows(rows, tokenizer, config.task, config.model.path)
    too_long = [f"{row.id} ({len(ids)})" for row, ids in zip(rows, encoded, strict=True) if len(ids) > limit]
    if too_long:
        found = f"{len(too_long)} prompts have more than {limit} tokens ({reason}): {listing(too_long)}"
        if config.task.long_prompts == "error":
            raise DataError(f"{found}. Raise the limit, or set task.long_prompts = 'drop' to leave them out")
        notes.append(f"{found}; left out")
    return [
        Prompt(row.id, ids, row.content, row.answer, row.columns, row.source)
        for row, ids in zip(rows, encoded, strict=True)
        if len(ids) <= limit
    ]
