"""Is accumulation exact on your own loss? One real batch under many splits, each gradient held against the whole's.

The whole batch runs at once on one rank; then as micro-batches of several sizes, the last one uneven, and over real
ranks. In fp64, where the model can: there rounding is 1e-16 and what is more than 1e-10 has a cause, which is looked
for.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stoker.batch import nest
from stoker.batch.accumulation import accumulate
from stoker.batch.causes import of_unknown
from stoker.batch.diagnose import Case, Diagnosis, corrected, diagnose, dtype_of, loop_cause
from stoker.batch.gradients import Gap, Rig, expected_draws, gaps, on_copies, untouched
from stoker.batch.out_of_memory import is_out_of_memory
from stoker.batch.proof import Cause, Proof, Split, Trial
from stoker.batch.prove_ranks import over_ranks, rank_causes
from stoker.batch.target import Maker, Target
from stoker.batch.telling import OnPart
from stoker.errors import ConfigError

__all__ = ["prove"]

Loop = Callable[[nn.Module, Sequence[Any]], object]

DIAGNOSIS_PASSES = 12
"""Passes over the whole batch that looking for causes takes where there are none."""
RANKS_START_S = 6.0
"""Until ranks that were started have imported torch and made the target, about."""


@dataclass
class _Going:
    """How far a proof is: in passes over the whole batch, and in ranks that must start."""

    tell: OnPart | None
    passes: int
    starts: int
    done: int = 0
    begun: float = field(default_factory=time.monotonic)

    def ended(self, what: str, passes: int) -> None:
        """A part of so many passes is over."""
        self.done += passes
        each = (time.monotonic() - self.begun) / self.done
        if self.tell is not None:
            self.tell(what, each * max(0, self.passes - self.done) + RANKS_START_S * self.starts)


def prove(
    target: Target | Maker | str,
    *,
    size: int,
    splits: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    deadline_s: float = 300.0,
    on_part: OnPart | None = None,
) -> Proof:
    """Split one batch of `size` examples every way that is asked for, and compare gradients.

    `target`: one, or where to find a function that makes one. `splits`: examples of a micro-batch, one run each, the
    last micro-batch holding what is left; by default half, a third and one. `ranks`: numbers of data-parallel ranks; by
    default 1 and, with a function, 2: ranks are processes of their own, which need to make the target themselves. They
    have `deadline_s` seconds for each number of ranks. `on_part`: told of each part when it has ended, and about how
    many seconds are left.

    The model keeps its modes. Weights, buffers, gradients, optimizer and random states are afterwards as they were;
    `make_batch` is called once. Needs memory for the whole batch in fp64 and about four more gradients.

    Raises ConfigError for a target without a loss, a batch that can't be taken apart or numbers that don't fit,
    RunError where a rank fails or isn't done in time; errors of the user's own code pass through.
    """
    target = Maker(target) if isinstance(target, str) else target
    made = _provable(target() if isinstance(target, Maker) else target)
    ranks = ranks if ranks is not None else ((1, 2) if isinstance(target, Maker) else (1,))
    sizes = _checked(size, splits, ranks, isinstance(target, Maker))
    batch = made.make_batch(size)
    if made.take is None and (there := nest.examples(batch)) != size:
        raise ConfigError(f"make_batch({size}) gave {there} examples; where dim 0 counts something else, give `take`")
    notes: list[str] = []
    several = sorted(set(ranks) - {1}) if isinstance(target, Maker) else []
    going = _Going(on_part, 2 + DIAGNOSIS_PASSES + (2 + len(several)) * len(sizes), len(several))
    with untouched(made.model):
        double, refusal = _can_double(made, batch)
        going.ended(f"computes in {'fp64' if double else 'its own dtype'}", 1)
        if refusal:
            notes.append(f"the model doesn't compute in fp64 ({refusal}), so its own dtype decided")
        with on_copies(made.model, torch.float64 if double else None):
            case = _case(made, nest.cast(batch, torch.float64) if double else batch, size, double)
            found = diagnose(case)
            going.ended("causes looked for", DIAGNOSIS_PASSES)
            trials, causes = _trials(case, found, sizes, notes, going) if found.conclusive else ([], [*found.causes])
        run = sorted({max(trial.split.ranks[0]) for trial in trials}, reverse=True)
        if isinstance(target, Maker) and found.conclusive:
            for number in several:
                more = over_ranks(target, made, batch, case, found, run, number, deadline_s)
                trials += [trial for trial, _ in more]
                causes += rank_causes(more, found, causes)
                going.starts -= 1
                going.ended(f"{number} ranks", len(sizes))
        own = dtype_of(made.model)
        if double and own != torch.float64 and found.conclusive:
            trials += _own_precision(made, batch, size, run)
            going.ended("in its own dtype", 1 + len(sizes))
    return _proof(case, found, trials, causes, notes)


def _provable(made: object) -> Target:
    """The target as it is. ConfigError where gradients couldn't be seen."""
    if not isinstance(made, Target):
        raise ConfigError(
            f"a {type(made).__name__} has no model and loss to differentiate in parts: prove takes a "
            "stoker.batch.Target(model, optimizer, make_batch, loss), or a Maker of one"
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in made.model.modules()):
        raise ConfigError("a TorchScript module can't be looked into: prove the model that it was made of")
    if beside := len(made.weights()) - sum(1 for _ in made.model.parameters()):
        raise ConfigError(
            f"the optimizer trains {beside} tensors that aren't parameters of the model, so their gradients would not "
            "be seen: make them the model's (a loss that learns can be a submodule of it)"
        )
    return made


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
            "stoker.batch.Maker('file.py:function') in place of the target, or ranks=(1,)"
        )
    return sorted(set(sizes), reverse=True)


def _case(target: Target, batch: Any, size: int, double: bool) -> Case:
    return Case(target, batch, size, Rig(target.model, target.loss), double)


def _can_double(target: Target, batch: Any) -> tuple[bool, str]:
    """Whether the loss runs in fp64, and why not."""
    if dtype_of(target.model) == torch.float64:
        return True, ""
    try:
        with on_copies(target.model, torch.float64):
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


def _trials(
    case: Case, found: Diagnosis, sizes: Sequence[int], notes: list[str], going: _Going
) -> tuple[list[Trial], list[Cause]]:
    """Every split on one rank that runs, and all causes up to here."""
    loop, better = _given(case), corrected(case, found)
    trials = []
    with expected_draws(case.target.model):
        for microbatch in sizes:
            rows = case.rows(microbatch)
            parts = [case.part(part) for part in rows]
            split = Split((tuple(len(part) for part in rows),))
            try:
                apart = gaps(case.rig.after(loop, parts), found.whole)
            except (RuntimeError, ValueError) as error:
                if is_out_of_memory(error) or len(rows[-1]) > 1:
                    raise
                notes.append(f"{split} was not run: single examples are refused ({error})")
                continue
            mended: Gap | None = None
            if better is not None and apart[0].relative > found.tolerance:
                mended = gaps(case.rig.after(better, parts), found.whole)[0]
            trials.append(Trial(split, case.precision, apart, mended))
            going.ended(f"split in {len(parts)}", 1)
    causes = list(found.causes)
    if case.target.accumulate is not None and (cause := loop_cause(case, found, loop)) is not None:
        causes.append(cause)
    off = max(trials, key=lambda trial: trial.gaps[0].relative, default=None)
    explained = any(cause.kind != "random draws" for cause in causes)
    if off is not None and off.gaps[0].relative > found.tolerance and not explained:
        causes.append(of_unknown(off))
    return trials, causes


def _own_precision(target: Target, batch: Any, size: int, sizes: Sequence[int]) -> list[Trial]:
    """The same splits as training computes them: what rounding alone makes there."""
    with on_copies(target.model), expected_draws(target.model):
        case = _case(target, batch, size, False)
        whole = case.rig.gradient(batch)
        return [
            Trial(
                Split((tuple(len(rows) for rows in parts),)),
                case.precision,
                gaps(case.rig.after(_given(case), [case.part(rows) for rows in parts]), whole),
            )
            for parts in (case.rows(microbatch) for microbatch in sizes)
        ]


def _proof(case: Case, found: Diagnosis, trials: list[Trial], causes: list[Cause], notes: list[str]) -> Proof:
    target = case.target
    by = "your own loop" if target.accumulate else "the target's count" if target.count else "examples"
    if found.alike and not target.count:
        notes.append(
            "every example of this batch holds as many tokens as the others, so it can't tell a mean over tokens "
            "from one over examples; a make_batch of ragged lengths can"
        )
    if not found.conclusive:
        notes.append("passes can't be repeated, so splits were not compared; mend that first")
    return Proof(
        examples=case.size,
        precision=case.precision,
        rounding=found.rounding,
        tolerance=found.tolerance,
        weighed_by=by,
        weighed=tuple(len(rows) for rows in found.parts),
        weightings=tuple(found.weightings),
        trials=tuple(trials),
        causes=tuple(causes),
        notes=tuple(notes),
    )
