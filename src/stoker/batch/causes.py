"""The causes of a wrong gradient in words: what happens, where, and what mends it."""

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from stoker.batch.layers import LOSS, MODEL
from stoker.batch.proof import Cause, Trial, Weighting

__all__ = ["EQUAL", "LOOP", "LOSS", "SUM", "of_coupling", "of_draws", "of_loop", "of_state", "of_unknown", "of_weights"]

LOOP = "the loop"
SUM = "1 each, as a sum"
EQUAL = "1 / their number"
"""Ways to weigh micro-batches without counting anything."""
SAME = 1e-6
"""Weights that differ by less are meant to be the same."""


def of_loop(right: Weighting, weights: Sequence[float], off: float) -> Cause:
    """A loop that weighs by `weights` what should be weighed by `right`."""
    ratios = [a / b if b else float("inf") for a, b in zip(weights, right.weights, strict=True)]
    listed = ", ".join(f"{weight:.4g}" for weight in weights)
    expected = ", ".join(f"{weight:.4g}" for weight in right.weights)
    what = f"it weighs the micro-batches {listed}; right are {expected} (by {right.name})"
    fix = _accumulate(right)
    if max(ratios) - min(ratios) <= SAME * abs(max(ratios)):
        number = len(weights)
        why = {number: "never divided", 1 / number: "divided twice"}
        said = [text for factor, text in why.items() if abs(ratios[0] / factor - 1) < SAME]
        what += f": {ratios[0]:.4g} times too large" + (f", as accumulation is {said[0]}" if said else "")
        return Cause("wrong weights", LOOP, off, what, f"divide once, by the units of the whole window: {fix}")
    if all(abs(weight) < 1e-9 for weight in weights[:-1]):
        what += ": only the last is left, as after a zero_grad inside the window"
        return Cause("wrong weights", LOOP, off, what, "call zero_grad once a window, after the step")
    alike = max(weights) - min(weights) <= SAME * max(map(abs, weights))
    by_tokens = alike and right.name != "examples"
    return Cause("per-microbatch mean" if by_tokens else "wrong weights", LOOP, off, what, fix)


def of_weights(given: Weighting, right: Weighting) -> Cause:
    """A loss whose parts are the whole under other weights than those given."""
    if right.code and given.name == "examples":
        return Cause(
            "per-microbatch mean",
            LOSS,
            given.relative,
            f"it is a mean over {right.name}, of each micro-batch alone; weighing by examples, as dividing by the "
            "number of micro-batches does, is off where they hold unequally many",
            _accumulate(right),
        )
    return Cause(
        "wrong weights", LOSS, given.relative, f"weighed by {given.name}, but right is {right.name}", _accumulate(right)
    )


def _accumulate(right: Weighting) -> str:
    if right.code:
        return (
            f"weigh by them: accumulate(model, loss, microbatches, count={right.code}); Target(count=...) for a proof"
        )
    if right.name == SUM:
        return "the loss is a sum: accumulate(model, loss, microbatches, reduction='sum')"
    if right.name == "the target's count":
        return "accumulate(model, loss, microbatches, count=...) with the target's count"
    return "accumulate(model, loss, microbatches), which weighs by examples"


def of_coupling(model: nn.Module, place: str, off: float) -> Cause:
    """A layer, or the loss, in which examples depend on one another."""
    if place == LOSS:
        what = "no layer's output depends on the other examples, but no weights make the parts the whole"
        fix = (
            "it compares or normalises examples, or adds terms with different denominators: take it over whole batches "
            "only, or return a sum of terms that each belong to one example"
        )
        return Cause("coupled examples", place, off, what, fix)
    module = _module(model, place)
    name = type(module).__name__
    if isinstance(module, _BatchNorm):
        what = f"{name} normalises by mean and variance of the micro-batch that it sees, not of the whole batch"
        fix = (
            "GroupNorm or LayerNorm instead, or eval() on it where its statistics are settled; SyncBatchNorm mends "
            "ranks, "
            "not accumulation"
        )
        return Cause("coupled examples", place, off, what, fix)
    what = f"{name} gives an example another output when other examples are with it, or at another place in the batch"
    return Cause("coupled examples", place, off, what, "compute each example from itself alone in its forward")


def of_state(model: nn.Module, place: str, off: float, hidden: bool) -> Cause:
    """A state that the forward changes; `hidden`: not in a buffer."""
    where = "" if place == LOSS else f"{type(_module(model, place)).__name__} "
    kept = "a state outside its buffers" if hidden else "a buffer that its forward changes and then uses"
    what = f"{where}gives another result when the same batch runs again: {kept}"
    return Cause("changing state", place, off, what, "change the state once an update, in the loop, not in the forward")


def of_draws(model: nn.Module, place: str, off: float) -> Cause:
    """Dropout and the like."""
    module = _module(model, place) if place != LOSS else None
    name = "it" if module is None else type(module).__name__
    probability = getattr(module, "p", None)
    if isinstance(probability, float):
        name += f" (p={probability:g})"
    return Cause(
        "random draws",
        place,
        off,
        f"{name} draws anew in each forward, so other splits get other draws; equal in expectation",
        "nothing to mend in training; for a comparison to the digit set its probability to 0 or use eval()",
    )


def _module(model: nn.Module, place: str) -> nn.Module:
    return model if place == MODEL else model.get_submodule(place)


def of_unknown(trial: Trial) -> Cause:
    """A split that is off, though everything that was looked at is right."""
    return Cause(
        "unknown",
        LOOP,
        trial.gaps[0].relative,
        f"the split {trial.split} is off at {trial.gaps[0].parameter}, though the loss, its layers and its weights "
        "are right",
        "look for what the loop does between micro-batches, and for what differs between ranks",
    )
