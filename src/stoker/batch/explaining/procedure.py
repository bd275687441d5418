"""What fits, what is fast, what trains well: the steps to a batch in their order, by measurements alone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from stoker.batch import randomness
from stoker.batch.certificate import Fit, Trial, growth
from stoker.batch.curve import SPENT
from stoker.batch.explaining.accounts import rate_account, smooth_account
from stoker.batch.explaining.explained import Explained
from stoker.batch.explaining.gradient import noise_of
from stoker.batch.explaining.verdict import Rung, Verdict, decide, worse
from stoker.batch.fitting import fit
from stoker.batch.noise import NoiseEstimate
from stoker.batch.ranges import remarks
from stoker.batch.rates import kind_of
from stoker.batch.scaling import Kind, rescale
from stoker.batch.scanning.rate_scan import RateScan
from stoker.batch.scanning.rates import scan_rates
from stoker.batch.scanning.scanned import Scan
from stoker.batch.scanning.sizes import microbatch, scan
from stoker.batch.sweeping import sweep
from stoker.batch.swept import Account, Sweep
from stoker.batch.target import Maker
from stoker.batch.telling import OnPart
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan, check, targeted
from stoker.errors import ConfigError, RunError

__all__ = ["explain"]

RUNGS = 3
"""Doublings to either side that are looked at."""
UPDATES, FEWEST_UPDATES = 150, 100
"""That a training has at the present batch, and at the largest one that is compared."""
FACTORS = (0.5, 1.0, 2.0)
"""Of the learning rate at the present batch; the scan goes on past an edge."""
LONGEST = 4.0
"""Smaller batches whose training would take more times the present one's are left out."""


def explain(
    target: str | Maker,
    present: Setting | int,
    *,
    samples: int | None = None,
    seeds: int | Sequence[int] = 3,
    limit_bytes: int | None = None,
    scenario: str | None = None,
    kind: Kind | None = None,
    on_trial: Callable[[Trial, int | None], None] | None = None,
    on_part: OnPart | None = None,
) -> Explained:
    """Larger, stay or smaller; see `Explained`. Four steps: what fits, what is fast, what trains well, the verdict.

    target: where to find a function that makes a Target with `load` and `validate`.
    present: the training as it is: its examples per update, or a whole setting.
    samples: that each training is compared at; None: `UPDATES` updates of the present batch, or `FEWEST_UPDATES` of the
        largest compared, whichever is more. Give the samples of your training where they are few enough to run.
    seeds: two or more, of the first weights and the data's order.
    limit_bytes: of memory; see `fit`. scenario: one of `ranges.SCENARIOS`, to hold the batch against what is usual.
    kind: of the optimizer's rule, where its class doesn't tell.

    ConfigError for a target that can't be trained so; RunError where not even one example fits.
    """
    maker = Maker(target) if isinstance(target, str) else target
    here = present if isinstance(present, Setting) else Setting(present)
    size = here.examples_per_update
    usual = None if scenario is None else list(remarks(scenario, per_device=here.microbatch, all_devices=size))
    if samples is not None and samples < size:
        raise ConfigError(f"samples = {samples:,}: fewer than one update of {size:,}")
    examples = _described(maker, here, kind)
    ladder = _ladder(size, min(examples or math.inf, samples or math.inf))
    fitted = fit(maker, limit_bytes=limit_bytes, start=here.microbatch, most=ladder[-1], on_trial=on_trial)
    at_once = sorted({min(here.microbatch, fitted.size), *(each for each in ladder if each <= fitted.size)})
    swept = sweep(
        maker, at_once if len(at_once) > 1 else None, present=min(here.microbatch, fitted.size), largest=fitted.size,
        remedies=False, roofline=False, on_part=_step("what is fast", on_part),
    )  # fmt: skip
    sizes = _compared(size, swept, ladder)
    plan = Plan(samples or max(UPDATES * size, FEWEST_UPDATES * sizes[-1]), kind=kind)
    now = replace(here, base_examples=here.base_examples or size, examples_per_microbatch=microbatch(size, fitted.size))
    rates = scan_rates(maker, plan, now, factors=FACTORS, seeds=seeds, on_part=_step("learning rate", on_part))
    tuned = replace(now, rate_factor=_factor(rates, now))
    noise = noise_of(maker, tuned, plan)
    scanned = scan(maker, sizes, plan, tuned, seeds=seeds, fits=fitted.size, on_part=on_part)
    resolution = (scanned.apart and scanned.apart.half_width) or 0.0
    verdict = decide(_rungs(scanned, fitted, swept.capacity_bytes), size, resolution)
    return Explained(
        usual=tuple(usual or ()),
        examples=examples,
        fit=fitted,
        sweep=replace(swept, accounts=()),  # answered below, with all that is known
        rates=rates,
        scan=scanned,
        noise=noise,
        verdict=verdict,
        accounts=_accounts(swept, scanned, noise, verdict, now),
    )


def _step(name: str, on_part: OnPart | None) -> OnPart | None:
    """Tells of the parts of one step. What is left is known in the last one only."""
    return None if on_part is None else lambda what, left: on_part(f"{name}: {what}", None)


def _described(maker: Maker, here: Setting, kind: Kind | None) -> int | None:
    """The examples there are. A target that can't be trained is told now, not after its memory was measured."""
    with randomness.kept():
        made = targeted(maker)
        check(made, Plan(1))
        kind or kind_of(made.optimizer)
        if made.most is not None and here.examples_per_update > made.most:
            raise ConfigError(f"a batch of {here.examples_per_update:,} examples, but the data set has {made.most:,}")
        return made.most


def _ladder(size: int, most: float) -> list[int]:
    """Halves of the present size, rounded down, it and its doubles. ConfigError where there is nothing but it."""
    below = [size >> halving for halving in range(RUNGS, 0, -1) if size >> halving]
    found = [*below, *(size << doubling for doubling in range(RUNGS + 1) if size << doubling <= most)]
    if len(found) < 2:
        raise ConfigError(f"a batch of {size} of {most} examples: there is no other to compare it with")
    return found


def _compared(size: int, swept: Sweep, ladder: Sequence[int]) -> list[int]:
    """Sizes whose trainings are worth their time: up to the first doubling that gains too little, and down while an
    equal number of samples doesn't take many times as long.
    """
    seconds = {point.size: point.seconds for point in swept.points}
    larger: list[int] = []
    for each in ladder[ladder.index(size) + 1 :]:
        larger.append(each)
        before = each // 2
        if each not in seconds or before not in seconds or 2 * seconds[before] / seconds[each] - 1 < SPENT:
            break
    smaller = [
        each
        for each in ladder
        if each < size and each in seconds and seconds[each] / each <= LONGEST * seconds[size] / size
    ]
    return [*smaller, size, *larger]


def _factor(rates: RateScan, here: Setting) -> float:
    """The one in use, unless it is plainly worse than the best. RunError where all diverged.

    No more certainty is asked for than that: a wrong rate would pass for a wrong batch.
    """
    if rates.best is None:
        raise RunError(rates.words)
    wrong = worse(rates.at(here.rate_factor).losses, rates.best.losses)
    return rates.best.setting.rate_factor if wrong else here.rate_factor


def _rungs(scanned: Scan, fitted: Fit, capacity: int | None) -> list[Rung]:
    """Of each batch, with its learning rate tuned where the scan tuned it."""
    made = []
    for arm in scanned.arms:
        size, memory = arm.setting.examples_per_update, _memory(fitted, arm.setting.microbatch, capacity)
        made.append(Rung(size, arm.rate, memory, scanned.tuned(size).losses))
    return made


def _memory(fitted: Fit, size: int, capacity: int | None) -> float | None:
    """The peak at a micro-batch over the limit, by the peaks that the fit measured."""
    limit, slope = fitted.limit_bytes or capacity, growth(fitted.trials)
    if fitted.peak_bytes is None or limit is None:
        return None
    return (fitted.peak_bytes + (slope or 0.0) * (size - fitted.size)) / limit


def _accounts(
    swept: Sweep, scanned: Scan, noise: NoiseEstimate | None, verdict: Verdict, now: Setting
) -> tuple[Account, ...]:
    target, base = scanned.equal.target, now.base_examples or now.examples_per_update
    given = {name: target.settings[name] for name in ("betas", "eps", "weight_decay") if name in target.settings}
    own = rescale(
        target.kind,
        base,
        verdict.present,
        learning_rate=target.settings["lr"],
        rule=now.rule,
        moments=now.moments,
        **given,
    )
    scale = None if noise is None or noise.scale is None else max(0.0, noise.scale.value)
    then = rescale(
        target.kind,
        verdict.present,
        verdict.recommended,
        learning_rate=own.learning_rate * now.rate_factor,
        rule=now.rule,
        moments=now.moments,
        noise_scale=scale,
    )
    rates = scanned.rates
    also = rates is not None and rates.arms[0].setting.examples_per_update == verdict.recommended
    return (
        swept.accounts[0],
        smooth_account(noise, verdict.present),
        rate_account(
            then,
            scanned.tuned(verdict.recommended).setting.rate_factor / now.rate_factor,
            scanned_at=verdict.recommended if also else verdict.present,
        ),
    )
