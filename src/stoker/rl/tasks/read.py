"""All rows of a task, split and checked, with no tokenizer or model needed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker.config.schema import RunConfig, Source
from stoker.errors import DataError
from stoker.rl.tasks.columns import Row, parse_rows
from stoker.rl.tasks.files import BadRow
from stoker.rl.tasks.sources import name_of, read_source
from stoker.rl.tasks.split import count_duplicates, hold_out, normalised, repeated_names, subset

__all__ = ["HOLDOUT", "RULE_REWARDS", "TaskRows", "check_enough", "listing", "read_rows"]

HOLDOUT = "holdout"
"""Name of the validation set that is taken out of the training sources."""
RULE_REWARDS = frozenset({"math", "exact"})
"""Built-in rewards that compare with the row's answer."""
SHOWN = 20
_NAME = re.compile(r"[\w .-]{1,60}")
"""Names become parts of file names and of metric keys."""


@dataclass(frozen=True)
class TaskRows:
    """Rows by source and by validation set."""

    train: Mapping[str, list[Row]]
    validation: Mapping[str, list[Row]]
    notes: list[str]
    """What the user should know of the data, one line each."""


def listing(items: Sequence[str]) -> str:
    """The first items, and how many more there are."""
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def read_rows(config: RunConfig) -> TaskRows:
    """Read, parse and split every source, and check rows against the batch.

    Raises DataError for a source that can't be read, missing columns, more malformed rows than
    task.bad_rows, and fewer rows than a step needs.
    """
    task, validation = config.task, config.validation
    names = [name_of(source) for source in (*task.sources, *validation.sets)]
    if clash := repeated_names([*names, HOLDOUT]):
        raise DataError(f"two data sources are called {clash[0]!r}: give each its own `name`")
    if unfit := [name for name in names if not _NAME.fullmatch(name)]:
        raise DataError(
            f"a data source would be called {unfit[0]!r}, after its path: give it a `name` of letters, digits, spaces, "
            "`.`, `_` and `-`, at most 60 of them"
        )
    needs_answer = config.warm_start.updates > 0 or any(r.function in RULE_REWARDS for r in config.rewards)
    notes: list[str] = []
    bad: list[BadRow] = []
    read: dict[str, list[Row]] = {}
    for name, source in zip(names, (*task.sources, *validation.sets), strict=True):
        rows, malformed, columns = parse_rows(source, name, read_source(source), needs_answer)
        read[name] = rows
        bad += malformed
        notes.append(f"{name}: {len(rows)} rows, prompt from `{columns.prompt}`, answer from `{columns.answer}`")
    notes += _judge_bad_rows(bad, task.bad_rows)
    sets = {
        name: subset(read[name], s.rows, config.seed)
        for name, s in zip(names[len(task.sources) :], validation.sets, strict=True)
    }
    train, held_out, split_notes = _split(
        [read[name] for name in names[: len(task.sources)]], validation.holdout, config.seed
    )
    by_source = {name: [row for row in train if row.source == name] for name in names[: len(task.sources)]}
    check_enough(by_source, task.sources, config.schedule.most(config.sampling.prompts_per_step))
    _check_warm_start(config, len(train))
    found = {HOLDOUT: held_out, **sets} if held_out else sets
    return TaskRows(by_source, found, [*notes, *split_notes, *_overlap_notes(train, sets)])


def _judge_bad_rows(bad: Sequence[BadRow], allowed: int) -> list[str]:
    if not bad:
        return []
    listed = "\n".join(f"  {row.place}: {row.reason}" for row in bad[:SHOWN])
    listed += f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    if len(bad) > allowed:
        raise DataError(
            f"{len(bad)} malformed rows, task.bad_rows allows {allowed}:\n{listed}\n"
            f"Mend them, or set task.bad_rows = {len(bad)} to leave them out"
        )
    return [f"{len(bad)} malformed rows left out:\n{listed}"]


def _split(sources: Sequence[list[Row]], holdout: int, seed: int) -> tuple[list[Row], list[Row], list[str]]:
    rows = [row for source in sources for row in source]
    notes = []
    if duplicates := count_duplicates(rows):
        notes.append(f"{duplicates} of {len(rows)} rows repeat another row's prompt; each is its own group")
    if not holdout:
        return rows, [], notes
    train, held_out, copies = hold_out(rows, holdout, seed)
    extra = f"; {copies} copies of them left out of training" if copies else ""
    notes.append(f"{HOLDOUT}: {len(held_out)} prompts taken out of training{extra}")
    return train, held_out, notes


def _overlap_notes(train: Sequence[Row], sets: Mapping[str, list[Row]]) -> list[str]:
    known = {normalised(row.content) for row in train} if sets else set()
    shared = {name: sum(normalised(row.content) in known for row in rows) for name, rows in sets.items()}
    return [f"{name}: {count} of its prompts are trained on too" for name, count in shared.items() if count]


def _check_warm_start(config: RunConfig, rows: int) -> None:
    if config.warm_start.updates and rows < config.warm_start.examples_per_update:
        raise DataError(
            f"the task has {rows} training rows, fewer than warm_start.examples_per_update = "
            f"{config.warm_start.examples_per_update}: add rows, or set it to {rows} or less"
        )


def check_enough(rows: Mapping[str, Sequence[object]], sources: Sequence[Source], prompts_per_step: int) -> None:
    """A step's prompts are all different, so each source needs as many rows as its share of a step."""
    total = sum(map(len, rows.values()))
    if total < prompts_per_step:
        counts = ", ".join(f"{name} {len(found)}" for name, found in rows.items())
        raise DataError(
            f"the task has {total} training rows ({counts}), but a step needs prompts_per_step = "
            f"{prompts_per_step} different prompts: add rows, hold out fewer, or "
            + (f"set it to {total} or less" if total else "leave fewer out")
        )
    weights = sum(source.weight for source in sources)
    for (name, found), source in zip(rows.items(), sources, strict=True):
        share = prompts_per_step * source.weight / weights
        if len(found) < int(share):
            raise DataError(
                f"task source '{name}' has {len(found)} training rows, but its weight {source.weight:g} of {weights:g} "
                f"asks for {share:.1f} of the {prompts_per_step} prompts of a step: add rows or lower its weight"
            )
