"""Renew the last column of docs/faults.md, the tests that hold each row, from their names; `--check` only compares."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "faults.md"
SHOWN = 3


def tests_by_row(kind: str) -> dict[int, list[str]]:
    """Tests called `test_<kind>_NN_...`, or `..._NN_and_MM_...`, by number."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for match in re.finditer(
            rf"^def (test_{kind}_(\d\d)(?:_and_(\d\d))?_\w+)", path.read_text("utf-8"), re.MULTILINE
        ):
            for number in filter(None, match.groups()[1:]):
                found.setdefault(int(number), []).append(match[1])
    return {number: list(dict.fromkeys(names)) for number, names in found.items()}


def held_by(names: list[str]) -> str:
    """The first tests by name, and how many more there are."""
    if not names:
        return "open"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:SHOWN]) + more


def renewed(table: str, kind: str) -> str:
    """A table whose first column is a row's number and whose last one names its tests."""
    tests = tests_by_row(kind)
    return re.sub(
        r"^(\| (\d+) \|.*\|) [^|]* \|$",
        lambda row: f"{row[1]} {held_by(tests.get(int(row[2]), []))} |",
        table,
        flags=re.MULTILINE,
    )


def main() -> int:
    """Write the page, or with `--check` say whether it is up to date."""
    text = TARGET.read_text(encoding="utf-8")
    faults, heading, failures = text.partition("## Failures of a run")
    new = renewed(faults, "peer_fault") + heading + renewed(failures, "failure")
    if "--check" in sys.argv[1:]:
        if new == text:
            return 0
        print("docs/faults.md is out of date: run scripts/make_fault_docs.py")
        return 1
    TARGET.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
