"""Validation errors in plain words: path, what was given, what is allowed, the nearest valid key."""

import difflib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stoker.config.schema import RunConfig
from stoker.config.secrets import redact

__all__ = ["explain", "key_paths", "section_of"]

_NO_BATCH_SIZE = (
    "stoker has no batch size without a unit: see sampling.prompts_per_step (prompts in one step), "
    "sampling.samples_per_prompt, update.samples_per_update (samples behind one optimizer step) and "
    "update.tokens_per_microbatch (memory only)"
)
_OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.decay",
    "warmup_ratio": "optimizer.warmup_fraction",
    "beta": "kl.coefficient",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "delta": "algorithm.dual_clip",
    "loss_type": "algorithm.loss_weighting (cispo and sapo: algorithm.name)",
    "scale_rewards": "algorithm.advantage_scale",
    "importance_sampling_level": "algorithm.ratio",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "num_generations": "sampling.samples_per_prompt",
    "max_completion_length": "sampling.max_new_tokens",
    "max_tokens": "sampling.max_new_tokens",
    "max_prompt_length": "task.max_prompt_tokens",
    "max_steps": "stop.steps",
    "num_iterations": "update.epochs_per_step",
    "ppo_epochs": "update.epochs_per_step",
    "gradient_accumulation_steps": "update.samples_per_update (samples behind one optimizer step)",
    "gradient_checkpointing": "update.activation_gib",
    "model_name_or_path": "model.path",
    "dataset": "task.sources",
    "train_dataset": "task.sources",
    "eval_dataset": "validation.sets",
    "reward_funcs": "rewards",
    "output_dir": "runs_dir",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "report_to": "record.trackers",
}
"""What other frameworks call it."""
_NEEDS = {
    "string_type": "must be text in quotes",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list in [ ]",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "may hold letters, digits, spaces, `.`, `_` and `-`, at most 60 of them",
}


def explain(error: ValidationError) -> list[str]:
    """One line for each fault, none of them twice."""
    details = error.errors(include_url=False)
    paths = [_dotted(detail["loc"]) for detail in details]
    lines = []
    for path, detail in zip(paths, details, strict=True):
        # pydantic drops a bad entry and then counts the rest: that second complaint is noise
        if detail["type"] == "too_short" and any(other.startswith(f"{path}.") for other in paths):
            continue
        lines.append(_line(path, detail))
    return lines


def _line(path: str, detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{path}: unknown key; {_nearest(path)}"
    if kind == "missing":
        return f"{path}: missing; {_missing(path)}"
    if kind == "value_error":
        message = str(context["error"])
        return f"{path}: {message}" if path else message
    if kind in ("too_short", "too_long"):
        count = context.get("min_length", context.get("max_length"))
        bound = "at least" if kind == "too_short" else "at most"
        return f"{path}: needs {bound} {count} entr{'y' if count == 1 else 'ies'}, {context['actual_length']} given"
    need = _NEEDS.get(kind, detail["msg"].replace("Input should be", "must be"))
    if kind == "literal_error":
        need = f"must be {context['expected']}" + _similar_value(detail["input"], context["expected"])
    return f"{path} = {_shown(detail['input'])}: {need}"


def _missing(path: str) -> str:
    if path == "task":
        return 'a run needs a [task] with sources = [{ path = "..." }]'
    if path == "name":
        return 'give the run a name, e.g. name = "first-run"'
    return "it has no default"


def _similar_value(given: object, expected: str) -> str:
    choices = [word.strip(" '") for part in expected.split(" or ") for word in part.split(",")]
    close = difflib.get_close_matches(str(given), choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _shown(value: object) -> str:
    text = redact(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def _dotted(location: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in location)


def _nearest(path: str) -> str:
    """Advice for an unknown key: same section first, then the same name elsewhere, then anything close."""
    parts = path.split(".")
    section, name = _general(parts[:-1]), parts[-1]
    if "batch_size" in name:
        return _NO_BATCH_SIZE
    known_as = _OTHER_NAMES.get(name, "")
    if section and known_as.startswith(f"{section}."):
        return f"stoker calls it {known_as}"
    siblings = [key for key in key_paths() if key.rpartition(".")[0] == section]
    names = [key.rpartition(".")[2] for key in siblings]
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f"did you mean {'.'.join([*parts[:-1], close[0]])}?"
    if known_as:
        return f"stoker calls it {known_as}"
    by_name: dict[str, str] = {}
    for key in key_paths():
        by_name.setdefault(key.rpartition(".")[2], key)
    if close := difflib.get_close_matches(name, list(by_name), n=1, cutoff=0.75):
        return f"did you mean {by_name[close[0]]}?"
    return f"{section or 'a run file'} has {', '.join(names)}"


def _general(parts: Sequence[str]) -> str:
    return ".".join("0" if part.isdecimal() else part for part in parts)


def key_paths(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every valid dotted key of a run file; entries of lists appear at position 0."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        table, is_list = section_of(field.annotation)
        if table is not None:
            yield from key_paths(table, f"{path}.0." if is_list else f"{path}.")


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The table behind a field's type, and whether the field is a list of such tables."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and arguments and isinstance(arguments[0], type) and issubclass(arguments[0], BaseModel):
        return arguments[0], True
    return None, False
