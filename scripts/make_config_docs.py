"""Write docs/run-file.md from the docstrings of the config schema; `--check` only compares."""

import sys
import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types as at
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from stoker.config.explain import section_of
from stoker.config.schema import RunConfig

TARGET = Path(__file__).parents[1] / "docs" / "run-file.md"
INTRODUCTION = """\
# The run file

Every key of a run file (`run.toml`), made from the code. Keys left out have the default. An unknown key is an
error that names the nearest valid one. Any key can be overridden on the command line, entries of lists by
position: `stoker train run.toml sampling.temperature=0.8 rewards.0.weight=2`.

A *prompt* is one row of the task, a *sample* one generated answer, a *group* the samples of one prompt, a *step*
one rollout with its updates, an *update* one optimizer step, a *micro-batch* what one forward/backward holds.

Secrets don't belong here: a value that looks like one is refused. They come from the environment.
"""
BOUNDS = {at.Gt: (">", "gt"), at.Ge: (">=", "ge"), at.Lt: ("<", "lt"), at.Le: ("<=", "le")}
NAMES = {str: "text", int: "whole number", float: "number", bool: "true / false", dict: "table"}


def type_text(annotation: Any) -> str:
    """A type in the words of a TOML file."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0]) + bounds_text(
            arguments[1].metadata if hasattr(arguments[1], "metadata") else arguments[1:]
        )
    if origin is Literal:
        return " / ".join(f"`{value}`" for value in arguments)
    if origin is UnionType or origin is typing.Union:
        return " / ".join(type_text(part) for part in arguments if part is not NoneType)
    if origin is tuple:
        return "list of " + ", ".join(type_text(part) for part in arguments if part is not Ellipsis)
    return NAMES.get(origin or annotation, "table")


def bounds_text(metadata: Any) -> str:
    """Numeric limits, ` > 0, <= 1`."""
    signs = [
        f" {sign} {getattr(item, name):g}"
        for item in metadata
        for kind, (sign, name) in BOUNDS.items()
        if isinstance(item, kind)
    ]
    return ",".join(signs)


def default_text(value: Any) -> str:
    """A default as TOML shows it."""
    if value is PydanticUndefined:
        return "**needed**"
    if value is None:
        return "(left out)"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return "`[" + ", ".join("..." if isinstance(entry, BaseModel) else repr(entry) for entry in value) + "]`"
    return f"`{value}`"


def section(model: type[BaseModel], path: str, is_list: bool, defaults: BaseModel | None = None) -> list[str]:
    """One table of keys, then the sections inside it. `defaults`: what the section holds when left out."""
    heading = f"## {'[[' if is_list else '['}{path}{']]' if is_list else ']'}" if path else "## Top level"
    lines = [
        heading,
        "",
        " ".join((model.__doc__ or "").split()),
        "",
        "| key | value | default | |",
        "|---|---|---|---|",
    ]
    below: list[str] = []
    for name, field in model.model_fields.items():
        default = getattr(defaults, name, field.default)
        inner, inner_list = section_of(field.annotation)
        if inner is not None:
            below += section(inner, f"{path}.{name}" if path else name, inner_list, None if inner_list else default)
            continue
        kind = type_text(field.annotation) + bounds_text(field.metadata)
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {kind} | {default_text(default)} | {meaning} |")
    return [*lines, "", *below] if len(lines) > 6 else [*lines[:4], *below]


def document() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *section(RunConfig, "", is_list=False)]).rstrip() + "\n"


def main() -> int:
    """Write the page, or with `--check` say whether it is up to date."""
    text = document()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text(encoding="utf-8") == text:
            return 0
        print("docs/run-file.md is out of date: run scripts/make_config_docs.py")
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
