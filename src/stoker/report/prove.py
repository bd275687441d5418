"""Pictures of a proof of accumulation: how far each split's gradient is from the whole's, and why."""

from collections.abc import Iterator, Mapping
from typing import Any

from stoker.report.bars import bars
from stoker.report.html import Section, Table

__all__ = ["sections"]

LEAST = 1e-17
"""Where the logarithmic axis begins: below what fp64 can tell apart."""
Json = Mapping[str, Any]


def sections(found: Json) -> Iterator[Section]:
    """Of a proof's JSON."""
    deciding = [trial for trial in found["trials"] if trial["precision"] == found["precision"]]
    others = [trial for trial in found["trials"] if trial["precision"] != found["precision"]]
    yield Section(
        f"Accumulation of {found['examples']} examples: {found['verdict']}",
        lead=_lead(found),
        picture=_splits(deciding, found["tolerance"]) if deciding else "",
        table=_weightings(found),
        warnings=found["notes"],
    )
    if found["causes"]:
        yield Section(
            "Why, and what to do",
            table=Table(
                ("cause", "where", "difference", "what", "fix"),
                [(c["kind"], c["place"], _share(c["relative"]), c["what"], c["fix"]) for c in found["causes"]],
                words=(0, 1, 3, 4),
            ),
        )
    if others:
        yield Section(
            f"The same splits in {others[0]['precision']}, as training computes them",
            lead="What is left here is rounding, which no way of accumulating can avoid." if found["equal"] else "",
            picture=_splits(others, None),
        )


def _lead(found: Json) -> str:
    largest = found["largest"]
    if largest is None:
        return ""
    return (
        f"Largest difference {_share(largest['relative'])} of the largest gradient of {largest['parameter']}, in "
        f"{found['precision']}; rounding alone makes {_share(found['rounding'])}. "
        f"Micro-batches weighed by {found['weighed_by']}."
    )


def _splits(trials: list[Json], tolerance: float | None) -> str:
    rows = []
    for trial in trials:
        gap = trial["gaps"][0]
        wrong = tolerance is not None and gap["relative"] > tolerance
        name = _split(trial["split"]["ranks"])
        rows.append(
            (name, gap["relative"], "--rose" if wrong else "--green", f"at {gap['parameter']}" if wrong else "")
        )
        if trial["corrected"] is not None:
            rows.append(("", trial["corrected"]["relative"], "--slate", "with the weights that are right"))
    mark = None if tolerance is None else ("a fault is more than", tolerance)
    return bars(rows, form=_share, log_from=LEAST, mark=mark)


def _split(ranks: list[list[int]]) -> str:
    """As the proof names it: 5 x 1, 3 + 3 + 2, 2 ranks: 4 | 4."""
    shown = [_sizes(sizes) for sizes in ranks]
    return shown[0] if len(shown) == 1 else f"{len(shown)} ranks: {' | '.join(shown)}"


def _sizes(sizes: list[int]) -> str:
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    if len(sizes) > 4 and len(set(sizes[:-1])) == 1:
        return f"{len(sizes) - 1} x {sizes[0]} + {sizes[-1]}"
    return " + ".join(map(str, sizes))


def _weightings(found: Json) -> Table | None:
    if not found["weightings"]:
        return None
    return Table(
        ("micro-batches weighed by", "difference", "as `count`"),
        [(each["name"], _share(each["relative"]), each["code"]) for each in found["weightings"]],
        words=(0, 2),
    )


def _share(relative: float) -> str:
    return f"{relative:.1%}" if relative >= 0.001 else f"{relative:.1e}"
