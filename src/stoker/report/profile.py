"""The table of a profile, from the run folder's profile.json."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stoker.errors import RunError

__all__ = ["read_profile", "render"]

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def read_profile(folder: Path) -> dict[str, Any]:
    """What `stoker train --profile` measured. Raises RunError where there is none."""
    path = folder / "profile.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} can't be read ({error}): profile a run with `stoker train RUN --profile N`") from error
    assert isinstance(found, dict)
    return found


def render(profile: Mapping[str, Any], folder: Path) -> str:
    """Seconds, shares, rates and the longest operators, phase by phase."""
    return "\n".join([*_head(profile), "", *_table(profile), "", *_operators(profile), "", *_where(folder)])


def rate(flops: float) -> str:
    """FLOP/s with a prefix: 83.1 GFLOP/s."""
    factor, prefix = next(((f, p) for f, p in PREFIXES if flops >= f), (1.0, ""))
    return f"{flops / factor:.1f} {prefix}FLOP/s"


def _head(profile: Mapping[str, Any]) -> Iterator[str]:
    steps, count = profile["steps"], len(profile["steps"])
    which = f"step {steps[0]}" if count == 1 else f"steps {steps[0]} to {steps[-1]}"
    yield (
        f"profile of {which}: {profile['seconds'] / count:.2f} s a step, tracing included "
        f"(the unprofiled one before: {profile['unprofiled_step_seconds']:.2f} s)"
    )
    plural = "" if profile["threads"] == 1 else "s"
    threads = f", {profile['threads']} thread{plural}" if profile["device"] == "cpu" else ""
    yield (
        f"matmul peak measured here: {rate(profile['matmul_peak_flops'])} "
        f"({profile['device']}, {profile['dtype']}{threads})"
    )
    padding = (
        "" if profile["padding"] is None else f"; {profile['padding']:.1%} of the micro-batches' tokens is padding"
    )
    yield f"{profile['tokens_per_second']:.1f} answer tokens/s over all phases{padding}"


def _table(profile: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'phase':<12}{'s/step':>9}{'share':>8}{'tokens/s':>11}{'MFU':>8}{'HFU':>8}"
    for name, phase in _by_time(profile):
        tokens = f"{phase['tokens'] / phase['seconds']:,.0f}" if phase["tokens"] else ""
        shares = [f"{share:.1%}" if share is not None else "" for share in (phase["mfu"], phase["hfu"])]
        part = f"{phase['seconds'] / profile['seconds']:.1%}"
        seconds = phase["seconds"] / len(profile["steps"])
        yield f"{name:<12}{seconds:>9.3f}{part:>8}{tokens:>11}{shares[0]:>8}{shares[1]:>8}".rstrip()


def _operators(profile: Mapping[str, Any]) -> Iterator[str]:
    yield "longest operators, by their own time as a share of their phase"
    for name, phase in _by_time(profile):
        told = [f"{one['name']} {one['seconds'] / phase['seconds']:.1%}" for one in phase["operators"]]
        if told:
            between = max(0.0, 1 - phase["in_operators"] / phase["seconds"])
            yield f"  {name}: {', '.join(told)}; between operators {between:.1%}"


def _by_time(profile: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return sorted(profile["phases"].items(), key=lambda item: -item[1]["seconds"])


def _where(folder: Path) -> Iterator[str]:
    yield "MFU counts the work that the method needs, HFU what was executed: padding, recomputation and repeats too"
    yield f"trace: {folder / 'trace.json.gz'} (open it at https://ui.perfetto.dev)"
