"""Metrics of one batch: sums over its counted tokens, whatever micro-batches it was cut into.

Sums stay on the device until the end, so that a GPU never waits for a metric.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from stoker.rl.types import Objective

__all__ = ["Tally"]

MEANS = {
    "ratio": "policy/ratio_mean",
    "clip_fraction": "policy/clipped",
    "approx_kl": "policy/update_kl",
    "mismatch_abs": "policy/mismatch",
    "mismatch_kl": "policy/mismatch_kl",
    "entropy": "policy/entropy",
    "reference_kl": "kl/mean",
    "kl_loss": "kl/loss",
    "value": "critic/value_mean",
    "value_clip_fraction": "critic/clipped",
}
MAXIMA = {"ratio": "policy/ratio_max", "mismatch_abs": "policy/mismatch_max"}


class Tally:
    """Adds up micro-batches; `metrics` names the results by the keys of `record.metrics`."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._tokens = 0
        self._useful = 0
        self._padded = 0
        self._microbatches = 0

    def add(self, tokens: int, weights: Tensor, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """Tensors (B, T), `loss` and `metrics` 0 outside the mask, which counts `tokens`."""
        self._tokens += tokens
        self._sum("loss", (weights * loss.detach()).sum())
        for name, metric in metrics.items():
            self._sum(name, metric.sum())
            if name in MAXIMA:
                peak = metric.amax()
                self._maxima[name] = peak if name not in self._maxima else torch.maximum(self._maxima[name], peak)
        for name in ("kl_loss", "entropy"):
            if name in metrics:
                self._sum(f"weighted {name}", (weights * metrics[name]).sum())

    def add_values(self, mask: Tensor, values: Tensor, returns: Tensor) -> None:
        """For the explained variance: first and second moments of returns and of what is left of them."""
        for name, series in (("return", returns), ("rest", returns - values.detach())):
            counted = torch.where(mask, series.double() if series.device.type != "mps" else series, 0.0)
            self._sum(name, counted.sum())
            self._sum(f"{name} squared", counted.square().sum())

    def add_microbatch(self, useful_tokens: int, padded_tokens: int) -> None:
        """Tokens that were computed, prompts included, and those of the rectangle they were padded to."""
        self._microbatches += 1
        self._useful += useful_tokens
        self._padded += padded_tokens

    @property
    def loss(self) -> float:
        return float(self._sums["loss"]) if "loss" in self._sums else 0.0

    def metrics(self) -> dict[str, float]:
        sums = {name: float(total) for name, total in self._sums.items()}
        count = max(self._tokens, 1)
        found = {key: sums[name] / count for name, key in MEANS.items() if name in sums}
        found |= {MAXIMA[name]: float(peak) for name, peak in self._maxima.items()}
        if self._objective.loss == "value":
            return found | {"critic/loss": self.loss} | self._explained(sums, count)
        found |= {"optim/loss": self.loss, "batch/microbatches": float(self._microbatches)}
        if self._padded:
            found["batch/padding"] = 1 - self._useful / self._padded
        if self._objective.loss == "policy":
            leash = self._objective.kl_coefficient * sums.get("weighted kl_loss", 0.0)
            bonus = self._objective.entropy_coefficient * sums.get("weighted entropy", 0.0)
            found["policy/loss"] = self.loss - leash + bonus
        return found

    def _explained(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        if "return" not in sums:
            return {}
        variance, rest = (sums[f"{n} squared"] / count - (sums[n] / count) ** 2 for n in ("return", "rest"))
        mean = {"critic/return_mean": sums["return"] / count}
        # With equal returns there is nothing to explain.
        return mean if variance <= 1e-12 else mean | {"critic/explained_variance": 1 - rest / variance}

    def _sum(self, name: str, amount: Tensor) -> None:
        self._sums[name] = amount if name not in self._sums else self._sums[name] + amount
