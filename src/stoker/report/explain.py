"""The page of `stoker batch explain`: the verdict, then the pictures of every step behind it."""

from collections.abc import Iterator, Mapping
from typing import Any

from stoker.report import fit, scan, sweep
from stoker.report.html import Section, Table

__all__ = ["sections"]


def sections(found: Mapping[str, Any]) -> Iterator[Section]:
    """Of an explanation's JSON."""
    verdict = found["verdict"]
    signals = [(each["name"], each["says"] or "not known", each["words"]) for each in verdict["signals"]]
    yield Section(
        "Verdict", lead=verdict["words"], table=Table(("signal", "says", "why"), signals, words=(0, 1, 2)),
        warnings=found["usual"],
    )  # fmt: skip
    yield sweep.accounts(found["accounts"])
    yield from scan.sections(found["scan"])
    yield from scan.rate_sections(found["rates"])
    yield from sweep.sections(found["sweep"])
    yield from fit.sections(found["fit"])
