"""Overrides of the command line, `a.b=c`: which key gets which value."""

import copy
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from stoker.config.schema import RunConfig
from stoker.config.secrets import redact
from stoker.errors import ConfigError

__all__ = ["apply"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def apply(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with each `path=value` set, in order.

    Parts of a path are keys, or positions in a list (`rewards.0.weight=2`; one past the end adds an
    entry). A value is read as TOML, and as plain text where it isn't TOML.
    """
    result = copy.deepcopy(data)
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(_BARE_KEY.fullmatch(key) for key in keys):
            raise ConfigError(f"override {redact(override)!r}: write it as path=value, e.g. sampling.temperature=0.8")
        _set(result, keys, _parse(text.strip(), redact(override)), redact(override))
    return result


def _parse(text: str, override: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # numbers of thousands of digits and deep nesting, too
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(
                f"override {override!r}: the value begins like a TOML list, table or string, but is not one; "
                "check its brackets and quotes (and that the shell kept them)"
            ) from None
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _set(data: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    here: Any = data
    for depth, key in enumerate(keys):
        done = ".".join(keys[:depth])
        is_last = depth == len(keys) - 1
        if isinstance(here, list):
            slot: Any = _position(here, key, done, override)
            if slot == len(here):
                here.append({})
        elif isinstance(here, dict):
            slot = key
            if not is_last and key not in here:
                here[key] = _default(keys[: depth + 1])
        else:
            raise ConfigError(f"override {override!r}: {done} is {redact(repr(here))}, which has no part {key!r}")
        if is_last:
            here[slot] = value
        else:
            here = here[slot]


def _position(entries: list[Any], key: str, path: str, override: str) -> int:
    if not key.isdecimal() or int(key) > len(entries):
        raise ConfigError(
            f"override {override!r}: {path} is a list of {len(entries)}; after it comes a position from 0 to "
            f"{len(entries)} (the last adds an entry), not {key!r}"
        )
    return int(key)


def _default(keys: list[str]) -> Any:
    """What a table or list that the run file leaves out holds before an override reaches into it."""
    value: Any = RunConfig.model_fields[keys[0]].default if keys[0] in RunConfig.model_fields else None
    for key in keys[1:]:
        value = getattr(value, key, None)
    if isinstance(value, tuple):
        return [entry.model_dump(exclude_unset=True) if isinstance(entry, BaseModel) else entry for entry in value]
    return {}
