"""Why the gradient of a split differs from that of the whole: each possible cause is provoked on its own, and placed.

In this order, as each would hide the next: state that changes between calls, random draws, layers and losses that
couple examples, weights. Draws are replaced by their expectation while the others are looked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stoker.batch import causes, layers, nest
from stoker.batch.accumulation import accumulate
from stoker.batch.gradients import Gradient, Rig, combined, expected_draws, fit_weights, worst
from stoker.batch.proof import Cause, Weighting
from stoker.batch.target import Target
from stoker.batch.units import units
from stoker.errors import RunError

__all__ = ["Case", "Diagnosis", "corrected", "diagnose", "dtype_of", "loop_cause"]

EXACT = 1e-10
"""Largest relative difference between equal gradients in fp64."""
ROUNDING_AT_MOST = 1e-5
"""What moves a gradient more than this in fp64 is no rounding, not even of a model that casts to fp32."""


@dataclass
class Case:
    """One real batch of a target, in the precision that decides."""

    target: Target
    batch: Any
    size: int
    rig: Rig
    double: bool

    @property
    def exact(self) -> float:
        """Largest relative difference between two runs of the same pass."""
        return EXACT if self.double else 8 * self._epsilon

    @property
    def rounding_at_most(self) -> float:
        """What changes a gradient more than this is none."""
        return ROUNDING_AT_MOST if self.double else min(0.05, 1000 * self._epsilon)

    @property
    def _epsilon(self) -> float:
        return max(torch.finfo(p.dtype).eps for p in self.target.model.parameters() if p.is_floating_point())

    def part(self, rows: Sequence[int]) -> Any:
        """The batch of those examples."""
        return (self.target.take or nest.take)(self.batch, rows)

    def rows(self, microbatch: int) -> list[list[int]]:
        """The places of the examples of micro-batches of that many; the last holds what is left."""
        return [list(range(self.size))[start : start + microbatch] for start in range(0, self.size, microbatch)]

    @property
    def precision(self) -> str:
        """What it computes in, as a report says it."""
        return "float64" if self.double else str(dtype_of(self.target.model)).removeprefix("torch.")

    def forward(self, rows: Sequence[int] | None, seed: int = 0, reset: bool = True) -> Callable[[], object]:
        """Runs the loss on some examples, all by default, with the start given."""

        def run() -> object:
            self.rig.reset(seed) if reset else self.rig.seed(seed)
            return self.target.loss(self.target.model, nest.shell(self.batch) if rows is None else self.part(rows))

        return run


@dataclass
class Diagnosis:
    """What is wrong with a loss and its model, whatever loop runs them."""

    whole: Gradient
    parts: list[list[int]] = field(default_factory=list)
    """The examples of the micro-batches that weights were tried on."""
    gradients: list[Gradient] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    weightings: list[Weighting] = field(default_factory=list)
    right: Weighting | None = None
    """The weights that give the whole; None where none do."""
    count: Callable[[Any], float] | None = None
    """Counts by the right weighting; None: each micro-batch is added as it is, or none is right."""
    rounding: float = 0.0
    tolerance: float = EXACT
    alike: bool = False
    """Every way to count this batch's tensors gives the weights of examples: it can't tell tokens from examples."""
    conclusive: bool = True
    """False where passes can't be repeated, so that splits say nothing."""


def diagnose(case: Case) -> Diagnosis:
    """Looks for every cause. Buffers, gradients and random states are left changed. RunError where the batch's own
    gradient isn't finite.
    """
    model, rig = case.target.model, case.rig
    everything = range(case.size)
    with expected_draws(model) as places:
        whole = _finite(rig.gradient(case.batch))
        found = Diagnosis(whole, tolerance=case.exact)
        later = worst(rig.gradient(case.batch, reset=False), whole)
        again = worst(rig.gradient(case.batch), whole)
        if max(later, again) > case.exact:
            hidden = again > case.exact
            rig.reset()
            where = layers.differing(
                model, case.forward(None), [(case.forward(None, reset=False), everything)], case.size, case.exact
            )
            found.causes += [
                causes.of_state(model, place, max(later, again), hidden) for place in where or [causes.LOSS]
            ]
            found.conclusive = not hidden
        reseeded = worst(rig.gradient(case.batch, seed=1), whole)
        if found.conclusive and reseeded > case.exact:
            where = layers.differing(
                model, case.forward(None), [(case.forward(None, seed=1), everything)], case.size, case.exact
            )
            found.causes += [causes.of_draws(model, place, reseeded) for place in where or [causes.LOSS]]
            found.conclusive = False
    if not found.conclusive:
        return found
    drawn = worst(rig.gradient(case.batch, seed=1), rig.gradient(case.batch, seed=0))
    if drawn > case.exact:
        found.causes += [causes.of_draws(model, place, drawn) for place in places or [causes.LOSS]]
    with expected_draws(model):
        _rounding(case, found)
        _weights(case, found)
    return found


def _finite(whole: Gradient) -> Gradient:
    """The gradient as it is. RunError where it holds what no other can be held against."""
    if wrong := [name for name, tensor in whole.items() if not tensor.isfinite().all()]:
        raise RunError(
            f"the gradient of the whole batch is not finite in {len(wrong)} of {len(whole)} parameters, first in "
            f"{wrong[0]}: no split can be compared with it; mend the loss, or give batches that it is finite on"
        )
    return whole


def _rounding(case: Case, found: Diagnosis) -> None:
    """What reordering the examples changes is rounding, unless it is too much for that. So is what scaling the loss
    changes, which shows where a model in fp64 casts to fp32 (logits, say).
    """
    orders = [
        list(range(case.size))[::-1],
        torch.randperm(case.size, generator=torch.Generator().manual_seed(0)).tolist(),
    ]
    again = [case.rig.gradient(case.part(order)) for order in orders]
    again += [case.rig.gradient(case.batch, scale=scale) for scale in (1 / 3, 0.7)]
    found.rounding = max(worst(gradient, found.whole) for gradient in again)
    if found.rounding <= case.rounding_at_most:
        found.tolerance = max(case.exact, (20 if case.double else 4) * found.rounding)


def _weights(case: Case, found: Diagnosis) -> None:
    """Which weights make the parts the whole; where none do, which layers couple the examples."""
    # Three uneven parts where there is enough for them, none of one example: some layers refuse that.
    size = case.size
    cuts = [0, -(-size // 2), -(-3 * size // 4), size] if size >= 8 else [0, size - min(size // 2, 2), size]
    found.parts = [list(range(start, stop)) for start, stop in pairwise(cuts)]
    if _weighed(case, found):
        return
    places = layers.differing(
        case.target.model,
        case.forward(None),
        [(case.forward(rows), rows) for rows in found.parts],
        case.size,
        max(1e-9, found.tolerance),
    )
    off = found.weightings[0].relative
    found.causes += [causes.of_coupling(case.target.model, place, off) for place in places or [causes.LOSS]]
    if places:  # without those layers, are the weights right?
        without = Diagnosis(found.whole, parts=found.parts, tolerance=found.tolerance)
        with layers.bypassed(case.target.model, places):
            without.whole = case.rig.gradient(case.batch)
            if _weighed(case, without):
                found.causes += without.causes


def _weighed(case: Case, found: Diagnosis) -> bool:
    """Tries every way to weigh; whether there is one, which need not be the one that was given."""
    target = case.target
    batches = [case.part(rows) for rows in found.parts]
    found.gradients = [case.rig.gradient(batch) for batch in batches]
    examples = [float(len(rows)) for rows in found.parts]
    ways: list[tuple[str, str, list[float], Any]] = []
    if target.count:
        ways.append(
            ("the target's count", "", _shares([float(target.count(batch)) for batch in batches]), target.count)
        )
    elif target.accumulate is None and (rows := [float(nest.examples(batch)) for batch in batches]) != examples:
        ways.append(("the length of dim 0", "", _shares(rows), nest.examples))  # which `accumulate` would count
    ways.append(("examples", "", _shares(examples), nest.examples if target.take is None else None))
    ways.append((causes.SUM, "", [1.0] * len(batches), None))
    ways.append((causes.EQUAL, "", [1 / len(batches)] * len(batches), None))
    for unit in units(case.batch):
        ways.append((unit.name, unit.code, _shares([unit.count(batch) for batch in batches]), unit.count))
    texts = any(isinstance(leaf, Tensor) and leaf.ndim == 2 and not leaf.is_floating_point() for leaf in _leaves(case))
    found.alike = texts and all(_shares(examples) == weights for _, code, weights, _ in ways if code)
    counts = []
    for name, code, weights, count in ways:
        if any(weighting.weights == tuple(weights) for weighting in found.weightings):
            continue  # the same as another on these micro-batches
        counts.append(count)
        relative = worst(combined(found.gradients, weights), found.whole)
        found.weightings.append(Weighting(name, code, tuple(weights), relative))
    for weighting, count in zip(found.weightings, counts, strict=True):
        if weighting.relative <= found.tolerance:
            found.right, found.count = weighting, count
            if weighting != found.weightings[0] and target.accumulate is None:
                found.causes.append(causes.of_weights(found.weightings[0], weighting))
            return True
    return _fitted(case, found)


def _fitted(case: Case, found: Diagnosis) -> bool:
    """Whether any weights at all make the parts the whole; a cause where they do."""
    if 2 * len(found.parts) > sum(tensor.numel() for tensor in found.whole.values()):
        return False  # so few numbers can be fitted by chance
    weights = fit_weights(found.gradients, found.whole)
    relative = worst(combined(found.gradients, weights), found.whole)
    if relative > max(1e-9, found.tolerance):
        return False
    found.right = Weighting("fitted weights", "", tuple(weights), relative)
    listed = ", ".join(f"{weight:.4g}" for weight in weights)
    sizes = ", ".join(str(len(rows)) for rows in found.parts)
    found.causes.append(
        Cause(
            "wrong weights",
            causes.LOSS,
            found.weightings[0].relative,
            f"weighing by {found.weightings[0].name} is off; micro-batches of {sizes} examples would have to weigh "
            f"{listed} (sum {sum(weights):.4g}), which no count of the batch's tensors gives. A loss divided by what "
            "doesn't add up over examples, such as rows x padded width, does that",
            "return the sum over tokens or examples from the loss and accumulate with reduction='sum' and a `count`",
        )
    )
    return True


def corrected(case: Case, found: Diagnosis) -> Callable[[nn.Module, Sequence[Any]], object] | None:
    """The loop with the weights that were found; None where none were."""
    if found.right is None or found.right.name == "fitted weights":
        return None
    count, loss = found.count, case.target.loss
    if count is None:
        if found.right.weights[0] != 1.0:
            return None
        return lambda model, parts: accumulate(model, loss, parts, reduction="sum")
    return lambda model, parts: accumulate(model, loss, parts, count=count)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Of its first floating parameter."""
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def loop_cause(case: Case, found: Diagnosis, loop: Callable[[nn.Module, Sequence[Any]], object]) -> Cause | None:
    """What a loop of the user's does to the micro-batches' gradients; None where it gives the whole, or none can."""
    if found.right is None:
        return None
    with expected_draws(case.target.model):
        made = case.rig.after(loop, [case.part(rows) for rows in found.parts])
    off = worst(made, found.whole)
    if off <= found.tolerance:
        return None
    weights = fit_weights(found.gradients, made)
    if worst(combined(found.gradients, weights), made) > max(1e-9, found.tolerance):
        return Cause(
            "unknown", causes.LOOP, off, "it leaves no weighted sum of the micro-batches' gradients",
            "look for what changes parameters or gradients inside the window (a step, a clip by value)",
        )  # fmt: skip
    return causes.of_loop(found.right, weights, off)


def _leaves(case: Case) -> list[Any]:
    return list(nest.leaves(case.batch).values())


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]
