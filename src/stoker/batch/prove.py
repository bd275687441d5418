"""Is accumulation exact on your own loss? One real batch under many splits, each gradient held against the whole's.

The whole batch runs at once on one rank; then as micro-batches of several sizes, the last one uneven, and over real
ranks. In fp64, where the model can: there rounding is 1e-16 and what is more than 1e-10 has a cause, which is looked
for.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stoker.batch import nest
from stoker.batch.accumulate import accumulate
from stoker.batch.causes import LOOP
from stoker.batch.diagnose import Case, Diagnosis, diagnose, loop_cause
from stoker.batch.gradients import Gap, Rig, expected_draws, gaps, in_double, untouched
from stoker.batch.out_of_memory import is_out_of_memory
from stoker.batch.proof import Cause, Proof, Split, Trial
from stoker.batch.ranks import launch
from stoker.batch.target import Maker, Target
from stoker.errors import ConfigError

__all__ = ["prove"]

Loop = Callable[[nn.Module, Sequence[Any]], object]


def prove(
    target: Target | Maker,
    *,
    size: int,
    splits: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    deadline_s: float = 300.0,
) -> Proof:
    """Split one batch of `size` examples every way that is asked for, and compare gradients.

    `splits`: examples of a micro-batch, one run each, the last micro-batch holding what is left; by default half, a
    third and one. `ranks`: numbers of data-parallel ranks; by default 1 and, with a `Maker`, 2: ranks are processes of
    their own, which need to make the target themselves. They have `deadline_s` seconds for each number of ranks.

    The model keeps its modes. Weights, buffers, gradients, optimizer and random states are afterwards as they were;
    `make_batch` is called once. Needs memory for the whole batch in fp64 and about four more gradients.

    Raises ConfigError for a target without a loss, a batch that can't be taken apart or numbers that don't fit,
    RunError where a rank fails or isn't done in time; errors of the user's own code pass through.
    """
    made = target() if isinstance(target, Maker) else target
    if not isinstance(made, Target):
        raise ConfigError(
            f"a {type(made).__name__} has no model and loss to differentiate in parts: prove takes a "
            "stoker.batch.Target(model, optimizer, make_batch, loss), or a Maker of one"
        )
    ranks = ranks if ranks is not None else ((1, 2) if isinstance(target, Maker) else (1,))
    sizes = _checked(size, splits, ranks, isinstance(target, Maker))
    batch = made.make_batch(size)
    if made.take is None and (there := nest.examples(batch)) != size:
        raise ConfigError(f"make_batch({size}) gave {there} examples; where dim 0 counts something else, give `take`")
    notes: list[str] = []
    with untouched(made.model):
        double, refusal = _can_double(made, batch)
        if refusal:
            notes.append(f"the model doesn't compute in fp64 ({refusal}), so its own dtype decided")
        with in_double(made.model) if double else nullcontext():
            case = _case(made, nest.cast(batch, torch.float64) if double else batch, size, double)
            found = diagnose(case)
            trials, causes = _trials(case, found, sizes, notes) if found.conclusive else ([], list(found.causes))
        run = sorted({max(trial.split.ranks[0]) for trial in trials}, reverse=True)
        for number in sorted(set(ranks) - {1}) if found.conclusive and isinstance(target, Maker) else []:
            more = _over_ranks(target, made, batch, case, found, run, number, deadline_s)
            trials += [trial for trial, _ in more]
            causes += _rank_causes(more, found, causes)
        own = _dtype(made.model)
        if double and own != torch.float64 and found.conclusive:
            trials += _own_precision(made, batch, size, found, run)
    return _proof(case, found, trials, causes, notes)


def _checked(size: int, splits: Sequence[int] | None, ranks: Sequence[int], made: bool) -> list[int]:
    if size < 2:
        raise ConfigError(f"size = {size}: a batch of at least 2 examples can be split")
    sizes = list(splits) if splits is not None else [-(-size // 2), -(-size // 3), 1]
    if wrong := [number for number in sizes if not 1 <= number < size]:
        raise ConfigError(f"splits holds {wrong[0]}: micro-batches of 1 to {size - 1} examples split a batch of {size}")
    if not ranks or min(ranks) < 1 or max(ranks) > size:
        raise ConfigError(f"ranks = {tuple(ranks)}: from 1 to {size}, as each needs an example")
    if max(ranks) > 1 and not made:
        raise ConfigError(
            "ranks are processes of their own and make the target themselves: give a "
            "stoker.batch.Maker('file.py:function') "
            "in place of the target, or ranks=(1,)"
        )
    return sorted(set(sizes), reverse=True)


def _case(target: Target, batch: Any, size: int, double: bool) -> Case:
    return Case(target, batch, size, Rig(target.model, target.loss), double)


def _can_double(target: Target, batch: Any) -> tuple[bool, str]:
    """Whether the loss runs in fp64, and why not."""
    if _dtype(target.model) == torch.float64:
        return True, ""
    try:
        with in_double(target.model):
            Rig(target.model, target.loss).gradient(nest.cast(batch, torch.float64))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return False, lines[0]
    return True, ""


def _given(case: Case) -> Loop:
    """The loop that is proven: the user's, or stoker's with the target's count."""
    target = case.target
    if target.accumulate is not None:
        return target.accumulate
    return lambda model, parts: accumulate(model, target.loss, parts, count=target.count)


def _corrected(case: Case, found: Diagnosis) -> Loop | None:
    """The loop with the weights that were found; None where none were."""
    if found.right is None or found.right.name == "fitted weights":
        return None
    count, loss = found.count, case.target.loss
    if count is None:
        if found.right.weights[0] != 1.0:
            return None
        return lambda model, parts: accumulate(model, loss, parts, reduction="sum")
    return lambda model, parts: accumulate(model, loss, parts, count=count)


def _rows(size: int, microbatch: int) -> list[list[int]]:
    return [list(range(size))[start : start + microbatch] for start in range(0, size, microbatch)]


def _trials(
    case: Case, found: Diagnosis, sizes: Sequence[int], notes: list[str]
) -> tuple[list[Trial], list[Cause]]:
    """Every split on one rank that runs, and all causes up to here."""
    loop, better = _given(case), _corrected(case, found)
    trials = []
    with expected_draws(case.target.model):
        for microbatch in sizes:
            rows = _rows(case.size, microbatch)
            parts = [case.part(part) for part in rows]
            split = Split((tuple(len(part) for part in rows),))
            try:
                apart = gaps(case.rig.after(loop, parts), found.whole)
            except (RuntimeError, ValueError) as error:
                if is_out_of_memory(error) or microbatch > 1:
                    raise
                notes.append(f"{split} was not run: single examples are refused ({error})")
                continue
            corrected: Gap | None = None
            if better is not None and apart[0].relative > found.tolerance:
                corrected = gaps(case.rig.after(better, parts), found.whole)[0]
            trials.append(Trial(split, _precision(case), apart, corrected))
    causes = list(found.causes)
    if case.target.accumulate is not None and (cause := loop_cause(case, found, loop)) is not None:
        causes.append(cause)
    off = max(trials, key=lambda trial: trial.gaps[0].relative, default=None)
    if off is not None and off.gaps[0].relative > found.tolerance and not [c for c in causes if c.kind != "random
    draws"]: causes.append(_unexplained(off))
    return trials, causes


def _over_ranks(
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
    better = _corrected(case, found)
    splits, made = [], []
    for microbatch in sizes:
        parts = _rows(case.size, microbatch)
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
        corrected = Gap(**furthest["corrected"]) if off and "corrected" in furthest else None
        results.append((Trial(split, _precision(case), apart, corrected), furthest.get("reweighted")))
    return results


def _rank_causes(
    results: Sequence[tuple[Trial, float | None]], found: Diagnosis, causes: Sequence[Cause]
) -> list[Cause]:
    """What goes wrong over ranks only."""
    wrong = [result for result in results if result[0].gaps[0].relative > found.tolerance]
    if not wrong or [cause for cause in causes if cause.kind != "random draws"]:
        return []
    trial, reweighted = max(wrong, key=lambda result: result[0].gaps[0].relative)
    if reweighted is None or reweighted > max(1e-9, found.tolerance):
        return [_unexplained(trial)]
    by = found.right.name if found.right is not None else "units"
    return [
        Cause(
            "per-rank mean",
            LOOP,
            trial.gaps[0].relative,
            "each rank divides by its own count, and DistributedDataParallel averages the ranks alike; weighed by "
            f"{by} they "
            "give the whole",
            "add the counts up over ranks before dividing (all_reduce), and multiply the loss by the ranks: "
            "accumulate(...) "
            "does both",
        )
    ]


def _own_precision(target: Target, batch: Any, size: int, found: Diagnosis, sizes: Sequence[int]) -> list[Trial]:
    """The same splits as training computes them: what rounding alone makes there."""
    case = _case(target, batch, size, False)
    with expected_draws(target.model):
        whole = case.rig.gradient(batch)
        return [
            Trial(
                Split((tuple(len(rows) for rows in parts),)),
                _precision(case),
                gaps(case.rig.after(_given(case), [case.part(rows) for rows in parts]), whole),
            )
            for parts in (_rows(size, microbatch) for microbatch in sizes)
        ]


def _unexplained(trial: Trial) -> Cause:
    return Cause(
        "unknown",
        LOOP,
        trial.gaps[0].relative,
        f"the split {trial.split} is off at {trial.gaps[0].parameter}, though the loss, its layers and its weights "
        "are right",
        "look for what the loop does between micro-batches, and for what differs between ranks",
    )


def _proof(case: Case, found: Diagnosis, trials: list[Trial], causes: list[Cause], notes: list[str]) -> Proof:
    target = case.target
    by = "your own loop" if target.accumulate else "the target's count" if target.count else "examples"
    if found.alike and not target.count:
        notes.append(
            "every example of this batch holds as many tokens as the others, so it can't tell a mean over tokens from "
            "one "
            "over examples; a make_batch of ragged lengths can"
        )
    if not found.conclusive:
        notes.append("passes can't be repeated, so splits were not compared; mend that first")
    return Proof(
        examples=case.size,
        precision=_precision(case),
        rounding=found.rounding,
        tolerance=found.tolerance,
        weighed_by=by,
        weighed=tuple(len(rows) for rows in found.parts),
        weightings=tuple(found.weightings),
        trials=tuple(trials),
        causes=tuple(causes),
        notes=tuple(notes),
    )


def _dtype(model: nn.Module) -> torch.dtype:
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def _precision(case: Case) -> str:
    return "float64" if case.double else str(_dtype(case.target.model)).removeprefix("torch.")
