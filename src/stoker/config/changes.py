"""What changed between the config of a run and the one that would continue it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.config.schema import RunConfig

__all__ = ["Change", "diff"]

_HARMLESS = re.compile(
    r"name|runs_dir|stop(\..*)?|record(\..*)?|checkpoint(\..*)?|validation(\.(?!holdout).*)?"
    r"|model\.(device|threads)|lora\.checkpoint|sampling\.concurrent_samples"
    r"|update\.(tokens_per_microbatch|logits_per_chunk|activation_gib)"
    r"|rewards\.\d+\.(timeout_s|max_error_rate)"
)
"""Keys that decide when and where work is done, not what is learned. Any other key breaks: a new one
must be argued for before a resume may change it silently."""
_WORKERS = re.compile(r"rewards\.\d+\.workers")


@dataclass(frozen=True)
class Change:
    """One key whose value differs; None stands for a key or list entry that isn't there."""

    path: str
    old: Any
    new: Any
    breaks: bool
    """The continued run would no longer be the run that was started."""

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r} -> {self.new!r}" + (" (alters the run)" if self.breaks else "")


def diff(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every changed key, in the order of the schema."""
    return [
        Change(path, before, after, _breaks(path, before, after))
        for path, before, after in _differences("", old.model_dump(), new.model_dump())
    ]


def _breaks(path: str, before: Any, after: Any) -> bool:
    if _WORKERS.fullmatch(path):  # how many there are decides nothing; with none a function sees all prompts together
        return not (before and after)
    return not _HARMLESS.fullmatch(path)


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(f"{path}.{key}" if path else key, old.get(key), new.get(key))
    elif _is_tables(old) and _is_tables(new):
        for index in range(max(len(old), len(new))):
            before, after = (tables[index] if index < len(tables) else None for tables in (old, new))
            yield from _differences(f"{path}.{index}", before, after)
    elif old != new:
        yield path, old, new


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, Mapping) for entry in value)
