"""The parts of a certified size's memory, predicted and measured, from its trace, its trials and its real states."""

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.batch.certificate import Layer, Part, Trial, growth

__all__ = ["largest_layer", "parts_of_peak"]

_HELD = ("weights", "gradients", "states", "buffers")


def parts_of_peak(
    trace: Mapping[str, Any] | None, held: Mapping[str, int], trials: Sequence[Trial], size: int, peak: int | None
) -> tuple[Part, ...]:
    """Weights, gradients, states, buffers, activations and the rest, of the peak at `size`; () where none is known.

    Measured: what is held is counted tensor by tensor after the last step (`held`); activations are what grows with
    the size, by the trials' peaks; the rest is what remains of the peak (an operator's working memory, libraries that
    the target loads, the allocator's holes). Predicted: weights, gradients, buffers and activations by the trace,
    states by a twin of the optimizer that steps over shapes alone; of the rest nothing is predicted.
    """
    slope = growth(trials)
    grown = None if slope is None else int(slope * size)
    measured: dict[str, int | None] = {**{name: held.get(name) for name in _HELD}, "activations": grown}
    predicted: dict[str, int | None] = dict.fromkeys(measured)
    if trace is not None:
        predicted = {
            "weights": trace["weight_bytes"],
            "gradients": trace["gradient_bytes"],
            "states": trace["state_bytes"],
            "buffers": trace["buffer_bytes"],
            "activations": int(sum(layer["fixed"] + layer["per_unit"] * size for layer in trace["layers"])),
        }
    if grown is None and not held:
        return ()
    counted = sum(value for value in measured.values() if value is not None)
    rest = None if peak is None else max(0, peak - counted)
    return (*(Part(name, predicted[name], measured[name]) for name in measured), Part("other", None, rest))


def largest_layer(trace: Mapping[str, Any] | None, size: int) -> Layer | None:
    """Of the modules and the loss; the batch itself is none."""
    layers = [] if trace is None else [layer for layer in trace["layers"] if layer["name"] != "batch"]
    if trace is None or not layers:
        return None
    top = max(layers, key=lambda layer: layer["fixed"] + layer["per_unit"] * size)
    return Layer(top["name"], top["kind"], int(top["fixed"] + top["per_unit"] * size))
