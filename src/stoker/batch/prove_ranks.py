"""The splits of a proof over real ranks: handing out the batch, and what goes wrong there only."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stoker.batch import causes, nest
from stoker.batch.diagnose import Case, Diagnosis, corrected
from stoker.batch.gradients import Gap
from stoker.batch.proof import Cause, Split, Trial
from stoker.batch.ranks import launch
from stoker.batch.target import Maker, Target
from stoker.errors import ConfigError

__all__ = ["over_ranks", "rank_causes"]


def over_ranks(
    maker: Maker,
    target: Target,
    batch: Any,
    case: Case,
    found: Diagnosis,
    sizes: Sequence[int],
    ranks: int,
    deadline_s: float,
) -> list[tuple[Trial, float | None]]:
    """Every split over that many ranks, and how far off it is with the ranks weighed by their units."""
    better = corrected(case, found)
    splits, made = [], []
    for microbatch in sizes:
        parts = case.rows(microbatch)
        if len(parts) < ranks:
            continue
        share = -(-len(parts) // ranks)
        dealt = [parts[place * share : (place + 1) * share] for place in range(ranks)]
        if not all(dealt):
            dealt = [parts[place::ranks] for place in range(ranks)]
        counts = [[float(found.count(case.part(rows))) for rows in mine] for mine in dealt] if found.count else None
        splits.append({"rows": dealt, "counts": counts, "correct": better is not None})
        made.append(Split(tuple(tuple(len(rows) for rows in mine) for mine in dealt)))
    if not splits:
        return []
    leaves = nest.leaves(batch)
    plain = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, Tensor)}
    if odd := [path for path, leaf in plain.items() if not isinstance(leaf, int | float | str | list | None)]:
        raise ConfigError(
            f"batch{odd[0]} is a {type(plain[odd[0]]).__name__}, which can't be handed to ranks: make batches of "
            "tensors, "
            "numbers and words, or leave ranks out (ranks=(1,))"
        )
    numbers = {"path": maker.path, "arguments": list(maker.arguments), "size": case.size, "double": case.double}
    tensors = {f"batch:{path}": leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    case.rig.reset()
    tensors |= {f"parameter:{name}": parameter for name, parameter in target.model.named_parameters()}
    tensors |= {f"buffer:{name}": buffer for name, buffer in target.model.named_buffers()}
    tensors |= {f"gradient:{name}": gradient for name, gradient in found.whole.items()}
    answers = launch(
        "stoker.batch.prove_rank", ranks, numbers | {"plain": plain, "splits": splits}, tensors, deadline_s
    )
    results: list[tuple[Trial, float | None]] = []
    for place, split in enumerate(made):
        ours = [answer["splits"][place] for answer in answers]
        furthest = max(ours, key=lambda answer: answer["gaps"][0]["relative"])
        apart = tuple(Gap(**gap) for gap in furthest["gaps"])
        off = apart[0].relative > found.tolerance
        mended = Gap(**furthest["corrected"]) if off and "corrected" in furthest else None
        results.append((Trial(split, case.precision, apart, mended), furthest.get("reweighted")))
    return results


def rank_causes(
    results: Sequence[tuple[Trial, float | None]], found: Diagnosis, others: Sequence[Cause]
) -> list[Cause]:
    """What goes wrong over ranks only."""
    wrong = [result for result in results if result[0].gaps[0].relative > found.tolerance]
    if not wrong or [cause for cause in others if cause.kind != "random draws"]:
        return []
    trial, reweighted = max(wrong, key=lambda result: result[0].gaps[0].relative)
    if reweighted is None or reweighted > max(1e-9, found.tolerance):
        return [causes.of_unknown(trial)]
    by = found.right.name if found.right is not None else "units"
    return [
        Cause(
            "per-rank mean",
            causes.LOOP,
            trial.gaps[0].relative,
            "each rank divides by its own count, and DistributedDataParallel averages the ranks alike; weighed by "
            f"{by} they "
            "give the whole",
            "add the counts up over ranks before dividing (all_reduce), and multiply the loss by the ranks: "
            "accumulate(...) "
            "does both",
        )
    ]
