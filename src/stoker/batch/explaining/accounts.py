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
    known = f"The noise scale is {noise.scale} {noise.unit}, the batch {present:,}"
    if noise.scale.value <= 0:
        return Account(name, answer, f"{known}: the updates differ no more than without noise.")
    costs = doubling(present, noise.scale.value)
    return Account(
        name,
        answer,
        f"{known}: by it a doubling costs {costs.more_examples:.0%} more {noise.unit} and saves "
        f"{costs.fewer_steps:.0%} of the updates.",
    )


def rate_account(rescaled: Rescaled, factor: float, *, scanned_at: int) -> Account:
    """What the learning rate must do: `rescaled` to the recommended batch, and the best `factor` of a scan of rates,
    which was at `scanned_at` examples per update.
    """
    name, stays = "learning rate to change", rescaled.now == rescaled.before
    tuned = rescaled.learning_rate * factor
    where = f"a scan of rates at {scanned_at:,}"
    scanned = f"{where} confirms it" if factor == 1 else f"{where} prefers it, {factor:g} times as high"
    if stays and factor == 1:
        return Account(name, "no", f"The batch stays, and so does the rate of {tuned:.3g}; {scanned}.")
    rule = "" if stays else f" for {rescaled.now:,} examples per update by the {rescaled.rule} rule"
    return Account(name, "yes", f"{tuned:.3g}{rule}; {scanned}.")
