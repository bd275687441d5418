"""From a run file and overrides to a RunConfig, and back."""

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from stoker.config import overrides as override
from stoker.config import secrets
from stoker.config.algorithm import fill_leash
from stoker.config.explain import explain
from stoker.config.schema import RunConfig
from stoker.errors import ConfigError

__all__ = ["from_dict", "load", "run_folder", "to_toml"]

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run file at `path` with overrides (`a.b=c`) applied. ConfigError names file, key and fix."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `stoker init {path}` writes a first one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read as UTF-8 text ({error})") from None
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits and deep nesting, too
        raise ConfigError(_malformed(path, text, str(error))) from None
    return _build(data, overrides, str(path))


def from_dict(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A RunConfig from nested plain data, as `tomllib` would give it."""
    return _build(dict(data), overrides, "run config")


def to_toml(config: RunConfig) -> str:
    """The resolved config, every default written out; keys whose value is None are left out.

    Reads back as an equal RunConfig.
    """
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def run_folder(config: RunConfig) -> Path:
    """`runs_dir/name`, resolved. ConfigError where that is not directly inside runs_dir."""
    if not _RUN_NAME.fullmatch(config.name):
        raise ConfigError(
            f"name = {secrets.redact(repr(config.name))}: a run's name has 1 to 100 letters, digits, `.`, `_` or `-` "
            "and begins with a letter or digit"
        )
    root = Path(config.runs_dir).resolve()
    folder = (root / config.name).resolve()
    if folder.parent != root:
        raise ConfigError(
            f"name = {config.name!r}: its folder is a link that leaves {config.runs_dir}; choose another name"
        )
    return folder


def _build(data: dict[str, Any], overrides: Sequence[str], origin: str) -> RunConfig:
    data = override.apply(data, overrides)
    faults = [
        f"{path}: looks like a secret, and run files are kept and shared; take it from the environment"
        for path in secrets.find(data)
    ] or _unwritable(data)
    if not faults:
        try:
            # strict JSON mode: "16" is not 16 and 1.0 is not a count, yet lists may stand for tuples
            config = RunConfig.model_validate_json(json.dumps(fill_leash(data)), strict=True)
            run_folder(config)
            return config
        except ValidationError as error:
            faults = explain(error)
        except ConfigError as error:
            faults = [str(error)]
    raise ConfigError(f"{origin}: {faults[0]}" if len(faults) == 1 else "\n  ".join([f"{origin}:", *faults]))


def _unwritable(data: Any, path: str = "") -> list[str]:
    """Values that a resolved run file couldn't hold exactly, each with its path."""
    if isinstance(data, Mapping):
        return [
            fault for key, value in data.items() for fault in _unwritable(value, f"{path}.{key}" if path else str(key))
        ]
    if isinstance(data, list | tuple):
        return [fault for index, value in enumerate(data) for fault in _unwritable(value, f"{path}.{index}")]
    if isinstance(data, float) and math.isnan(data):
        return [f"{path} = nan: must be a number"]
    if data is None and ".kwargs." in path:
        return [f"{path} = None: TOML has no such value; leave the key out"]
    if isinstance(data, str) and (reason := _unusable(data, path.rpartition(".")[2])):
        return [f"{path} = {secrets.redact(repr(data))}: {reason}"]
    if isinstance(data, int) and not -(2**63) <= data < 2**63:
        return [f"{path}: whole numbers go from -2^63 to 2^63 - 1"]
    if data is None or isinstance(data, str | int | float):
        return []
    return [f"{path} = {data}: a {type(data).__name__} can't stand in a run file; write it as text in quotes"]


def _unusable(text: str, key: str) -> str:
    """Why a text can't stand in a file, or for one; empty where it can."""
    if "\0" in text and key in ("path", "function", "runs_dir", "start_from"):
        return "holds a NUL character, and no file's name does"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode (half a surrogate pair, or bytes that are not UTF-8)"
    return ""


def _malformed(path: str | Path, text: str, message: str) -> str:
    """`file:line: what is wrong`, with the line itself."""
    lines = text.splitlines() or [""]
    found = re.search(r"\s*\(at line (\d+), column (\d+)\)", message)
    number = int(found[1]) if found else len(lines)
    reason = (
        message[: found.start()] if found else re.sub(r"\s*\(at end of document\)", ", at the end of the file", message)
    )
    shown = secrets.redact(lines[min(number, len(lines)) - 1].strip())
    return f"{path}:{number}: not TOML: {reason}\n  {shown}"
