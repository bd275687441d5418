"""Call a user's reward function the way the framework it was written for calls it.

- trl: `f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns)`, one list per step
- openrlhf: `f(queries, prompts, labels, **kw) -> {"rewards", "scores", "extra_logs"}`, one list per step
- verl: `f(data_source, solution_str, ground_truth, extra_info=None, **kw)`, per sample
- verifiers: any of `prompt, completion, answer, state, task, info, parser`, per sample

A row here is the dict that the parent sends: id, prompt (string or messages), text, token_ids, answer,
columns, source. A function gets only the arguments it names, unless it takes **kwargs.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.dotted import nearest
from stoker.errors import RewardError
from stoker.rl.rewards.answers import extract

__all__ = [
    "BATCHED",
    "CALLS",
    "REFERENCE_NAMES",
    "SIGNATURES",
    "Log",
    "TrainerState",
    "detect",
    "prompt_text",
    "resolve",
]

Row = Mapping[str, Any]

SIGNATURES: dict[str, frozenset[str]] = {
    "verl": frozenset({"solution_str", "ground_truth"}),
    "openrlhf": frozenset({"queries"}),
    "trl": frozenset(
        {"prompts", "completions", "completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric"}
    ),
    "verifiers": frozenset({"prompt", "completion", "answer", "state", "task", "info", "parser"}),
}
"""Argument names that tell a framework, in the order in which they are looked for."""
BATCHED = frozenset({"trl", "openrlhf"})
REFERENCE_NAMES = ("answer", "solution", "ground_truth", "label", "target", "reference")
"""Names under which a function may ask for the reference answer, where the row has no such column."""


@dataclass(frozen=True)
class TrainerState:
    """What TRL's `trainer_state` is used for."""

    global_step: int


class Log:
    """Collects what a function logs in one call: `extra` columns for the samples record, `metric` numbers."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.numbers: dict[str, list[float]] = {}

    def extra(self, column: str, values: Sequence[Any]) -> None:
        self.columns[column] = list(values)

    def metric(self, name: str, value: float) -> None:
        self.numbers.setdefault(name, []).append(float(value))


class Parser:
    """Stands for the verifiers parser: its answer is the one that the `math` reward would check."""

    def parse(self, text: str) -> str | None:
        found = extract(text)
        return found.text if found else None

    def parse_answer(self, completion: Any) -> str | None:
        return self.parse(completion if isinstance(completion, str) else completion[-1]["content"])


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def detect(function: Callable[..., Any], path: str) -> str | None:
    """The framework whose argument names the function uses; None: none of them.

    Raises RewardError if it takes only *args or **kwargs, since nothing then tells what it expects.
    """
    names = _parameters(function)
    for framework, known in SIGNATURES.items():
        if known & set(names):
            return framework
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in names.values()):
        raise RewardError(
            f"reward function '{path}': its arguments ({', '.join(names)}) don't tell which framework it is for; "
            f"set signature to one of {', '.join(SIGNATURES)}"
        )
    return None


def _check_kwargs(function: Callable[..., Any], path: str, kwargs: Mapping[str, Any]) -> None:
    names = _parameters(function)
    unknown = [name for name in kwargs if name not in names]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in names.values()):
        hint = nearest(unknown[0], list(names))
        raise RewardError(f"reward function '{path}' takes no argument '{unknown[0]}'{hint}")


def _made(factory: Callable[..., Any], path: str, kwargs: Mapping[str, Any]) -> Any:
    """What a factory (TRL's `get_...`) returns when it is called once with kwargs."""
    names = _parameters(factory)
    missing = [n for n, p in names.items() if p.default is p.empty and n not in kwargs]
    if missing:
        raise RewardError(
            f"reward function '{path}' takes ({', '.join(names)}): none of the arguments a reward is given, so it must "
            f"be a factory, but kwargs lacks '{missing[0]}'. For a reward of your own naming set signature to one of "
            f"{', '.join(SIGNATURES)}"
        )
    _check_kwargs(factory, path, kwargs)
    return factory(**kwargs)


def resolve(
    function: Callable[..., Any], path: str, signature: str, kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], str, dict[str, Any]]:
    """The function to call, its framework, and the keyword arguments to add to every call.

    A function that takes none of a reward's arguments is a factory: it is called once with kwargs and
    must return the reward function.
    """
    framework = detect(function, path) if signature == "auto" else signature
    if framework is not None:
        _check_kwargs(function, path, kwargs)
        return function, framework, dict(kwargs)
    made = _made(function, path, kwargs)
    framework = detect(made, path) if callable(made) else None
    if framework is None:
        raise RewardError(
            f"reward function '{path}' takes no reward arguments, and returned {type(made).__name__}, "
            "not a reward function"
        )
    return made, framework, {}


def _accepted(function: Callable[..., Any], offered: dict[str, Any], columns: set[str]) -> dict[str, Any]:
    """What of `offered` the function takes. Raises RewardError naming an argument that nothing fills."""
    names = _parameters(function)
    lacking = [
        n
        for n, p in names.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and n not in offered
    ]
    if lacking:
        have = ", ".join(sorted(columns)) or "none"
        raise RewardError(f"it needs '{lacking[0]}', which is no column of the task's rows (columns: {have})")
    if any(p.kind is p.VAR_KEYWORD for p in names.values()):
        return offered
    return {name: value for name, value in offered.items() if name in names}


def _completion(row: Row) -> Any:
    """Conversational prompts get a conversational completion, as in TRL and verifiers."""
    return row["text"] if isinstance(row["prompt"], str) else [{"role": "assistant", "content": row["text"]}]


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Each column as a list over the rows, None where a row lacks it; the reference under all its names."""
    names = dict.fromkeys(name for row in rows for name in row["columns"])
    columns = {name: [row["columns"].get(name) for row in rows] for name in names}
    for name in REFERENCE_NAMES:
        columns.setdefault(name, [row["answer"] for row in rows])
    return columns


def _names(rows: Sequence[Row]) -> set[str]:
    return {name for row in rows for name in row["columns"]}


def call_trl(function: Any, rows: Sequence[Row], step: int, log: Log, fixed: Mapping[str, Any]) -> Any:
    offered = {
        **_columns(rows),
        "prompts": [row["prompt"] for row in rows],
        "completions": [_completion(row) for row in rows],
        "completion_ids": [row["token_ids"] for row in rows],
        "trainer_state": TrainerState(step),
        "log_extra": log.extra,
        "log_metric": log.metric,
        **fixed,
    }
    return function(**_accepted(function, offered, _names(rows)))


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt as one text: that of its messages, a line each."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


def call_openrlhf(function: Any, rows: Sequence[Row], step: int, log: Log, fixed: Mapping[str, Any]) -> Any:
    """Queries are prompt + completion."""
    prompts = [prompt_text(row["prompt"]) for row in rows]
    queries = [prompt + row["text"] for prompt, row in zip(prompts, rows, strict=True)]
    return function(queries, prompts, [row["answer"] for row in rows], **fixed)


def call_verl(function: Any, rows: Sequence[Row], step: int, log: Log, fixed: Mapping[str, Any]) -> Any:
    (row,) = rows
    columns = row["columns"]
    model = columns.get("reward_model")
    truth = model["ground_truth"] if isinstance(model, Mapping) and "ground_truth" in model else row["answer"]
    offered = {
        "data_source": columns.get("data_source", row["source"]),
        "solution_str": row["text"],
        "ground_truth": truth,
        "extra_info": columns.get("extra_info"),
        **fixed,
    }
    return function(**_accepted(function, offered, set(columns)))


def call_verifiers(function: Any, rows: Sequence[Row], step: int, log: Log, fixed: Mapping[str, Any]) -> Any:
    (row,) = rows
    columns = row["columns"]
    offered = {
        "prompt": row["prompt"],
        "completion": _completion(row),
        "answer": row["answer"],
        "task": columns.get("task", row["source"]),
        "info": columns.get("info") or {},
        "parser": Parser(),
    }
    offered["state"] = {name: offered[name] for name in ("prompt", "completion", "answer", "task", "info")}
    offered.update(fixed)
    return function(**_accepted(function, offered, set(columns)))


CALLS = {"trl": call_trl, "openrlhf": call_openrlhf, "verl": call_verl, "verifiers": call_verifiers}
