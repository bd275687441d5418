"""Memory is left, raise the batch? Answered by three accounts: throughput, the gradient's noise, the rate. No torch."""

from stoker.batch.noise import NoiseEstimate
from stoker.batch.scaling import Rescaled
from stoker.batch.swept import Account
from stoker.batch.tradeoff import doubling

__all__ = ["rate_account", "smooth_account"]


def smooth_account(noise: NoiseEstimate | None, present: int) -> Account:
    """Whether the gradient at `present` examples per update is smooth already: beyond the noise scale it is."""
    name = "gradient already smooth"
    if noise is None or noise.scale is None:
        why = "no update of two micro-batches or more was seen" if noise is None else noise.why
        return Account(name, "not measured", f"The noise scale is undetermined: {why}.")
    low, high = noise.scale.interval or (noise.scale.value, noise.scale.value)
    answer = "yes" if present > high else "no" if present < low else "in part"
    costs = doubling(present, noise.scale.value, interval=noise.scale.interval)
    return Account(
        name,
        answer,
        f"The noise scale is {noise.scale} {noise.unit}, the batch {present:,}: by it a doubling costs "
        f"{costs.more_examples:.0%} more {noise.unit} and saves {costs.fewer_steps:.0%} of the updates.",
    )


def rate_account(rescaled: Rescaled, factor: float | None) -> Account:
    """What the learning rate must do: `rescaled` to the recommended batch, and the best `factor` of a scan about it."""
    name = "learning rate to change"
    tuned = rescaled.learning_rate * (factor or 1.0)
    scanned = (
        ""
        if factor is None
        else f"; a scan of rates prefers it, {factor:g} times as high"
        if factor != 1
        else ("; a scan of rates confirms it")
    )
    if rescaled.now == rescaled.before and tuned == rescaled.learning_rate:
        return Account(name, "no", f"The batch stays, and so does the rate of {tuned:.3g}{scanned}.")
    rule = (
        ""
        if rescaled.now == rescaled.before
        else (f" for {rescaled.now:,} examples per update by the {rescaled.rule} rule")
    )
    return Account(name, "yes", f"{tuned:.3g}{rule}{scanned}.")
