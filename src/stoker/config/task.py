"""The tables of the run file that say what to train and validate on."""

from typing import Annotated, Any, Literal

from pydantic import Field

from stoker.config.base import Name, NonNegativeInt, Positive, PositiveInt, Section, Text

__all__ = ["DATA_SUFFIXES", "Data", "Source", "Task", "Validation", "ValidationSet"]

DATA_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".parquet")
"""Of the files that a source may be."""


class Data(Section):
    """One file, dataset or generator with prompts."""

    path: Text
    """JSONL, parquet or CSV file, a Hugging Face dataset folder or name, or a generator `pkg.mod:fn` / `file.py:fn`."""
    name: Name = ""
    """Shown in metrics; empty: taken from the path."""
    split: str = "train"
    """Of a Hugging Face dataset."""
    limit: NonNegativeInt = 0
    """Rows to use; 0: all (a generator must end by itself or be limited)."""
    prompt_column: str = ""
    """Empty: found among the column schemas of TRL, verl, OpenRLHF and verifiers."""
    answer_column: str = ""
    """Empty: found likewise; a task may have no answers if its rewards need none."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of a generator, or of `datasets.load_dataset` for a Hugging Face name."""


class Source(Data):
    """Where training prompts come from: one file, dataset or generator."""

    weight: Positive = 1.0
    """Share of prompts drawn from this source, relative to the others."""


class Task(Section):
    """The prompts to train on and how they become model input."""

    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    system_prompt: str = ""
    """Put before every prompt; empty: none."""
    chat: Literal["auto", "always", "never"] = "auto"
    """auto: messages, and plain strings where a system prompt is set, go through the chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Handed to the chat template, e.g. enable_thinking."""
    max_prompt_tokens: PositiveInt = 1024
    """With system prompt and chat template."""
    long_prompts: Literal["error", "drop"] = "error"
    """Never cut silently: list the ids and stop, or list them and leave them out."""
    bad_rows: NonNegativeInt = 0
    """Malformed rows that may be skipped (each is reported with file and line)."""
    shuffle: bool = True
    """A new order in each pass over the rows."""


class ValidationSet(Data):
    """Prompts for validation only."""

    rows: NonNegativeInt = 0
    """Rows to evaluate; 0: all."""


class Validation(Section):
    """Held-out prompts: how often and how the policy is judged on them."""

    holdout: NonNegativeInt = 0
    """Rows taken out of the training sources for validation (duplicates stay on one side)."""
    sets: tuple[ValidationSet, ...] = ()
    every_samples: NonNegativeInt = 0
    """Evaluate each time this many samples were trained on; 0: only at start and end."""
    samples_per_prompt: PositiveInt = 1
    """1: greedy. More: also pass@k and mean over samples at the sampling temperature."""
    early_stop_after: NonNegativeInt = 3
    """Stop after this many evaluations in a row below best - 1 standard error; 0: never."""

    @property
    def regular(self) -> bool:
        """Something is held out, and judged while the run goes on."""
        return bool(self.every_samples and (self.holdout or self.sets))
