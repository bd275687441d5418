"""Two measurements of the critical batch against a regression whose critical batch is planted.

Labels are exact and inputs Gaussian, d of them, so that an example's gradient scatters in proportion to the gradient:
the noise scale is d + 1 examples from beginning to end. An update moves an eighth of the weights, drawn anew each time,
which is what limits a large batch. With n = 1 + (d + 1) / B, at rate r and batch B, it multiplies the expected loss by
exactly 1 - (2 r - n r^2) / 8, at the best rate 1 / n by 1 - 1 / (8 n),
so that the updates to a given loss are a constant times 7.5 + 8 (d + 1) / B, but for 1 %: the law of McCandlish et al.
(2018). Runs differ in d, from 32 to 96, and in all that is drawn.

- trade-off: `measure_tradeoff` trains at batches of 8 to 512, whatever the planted one, from a loss of 1 to 0.01.
  Planted is what its fit defines, B_crit = E_min / S_min: examples to the loss at the best rate in the limit of small
  batches, over updates in the limit of large ones, both exact. What the fit makes of exact points is printed beside it.
- branches: `branched` begins at a state that was trained for a while, and its branches are long enough for the first
  batch to come far below 0.01. Planted is what it defines: the batch, of all real ones, whose expected loss after the
  branch's samples is 0.01 above that of the first batch, each at its best rate, from that state.

Wanted: both within 25 % of what is planted in 9 of 10 runs. Intervals that hold it are counted too. Seeds from 1 on
were used to choose the figures below, the runs have seeds from 1,001 on and their own d.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.common import arguments, finish
from stoker.batch import LoaderOptions, Target
from stoker.batch.critical.branching import branched
from stoker.batch.critical.reaching import measure_tradeoff
from stoker.batch.tradeoff import fit_tradeoff
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan, train

RUNS, QUICK_RUNS = 10, 2
FIRST_SEED, DRAW = 1001, 2026
WITHIN = 0.25
WIDTHS = (32, 96)
PARTS = 8
"""Of the weights, of which an update moves one."""
EPOCH = 4096
"""Examples, drawn anew for each."""
GOAL = 0.01
"""Of the loss, which begins at 1."""
SIZES = (8, 16, 32, 64, 128, 256, 512)
BASE = 8
MULTIPLES = (1, 2, 4, 8, 16, 32)
BEFORE = (0, 256, 512)
"""Examples trained on before the branches."""
RATE = 0.05
"""At the base batch, the first guess."""
ORDERS, SEARCH_ORDERS = 6, 1
SEEDS = 6
Batch = tuple[Tensor, Tensor]


class Regression(nn.Module):
    """Its weights are measured from the truth, and begin at a loss of 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randint(0, 2, (width,)) * 2.0 - 1) * math.sqrt(2 / width))

    def forward(self, batch: Batch) -> Tensor:
        inputs, moved = batch  # (B, d), (d,)
        weight = torch.where(moved, self.weight, self.weight.detach())
        return (inputs @ weight).square().mean() / 2


@dataclass(frozen=True)
class Problem:
    """`width` is d."""

    width: int

    def target(self) -> Target:
        model = Regression(self.width)

        def load(size: int, options: LoaderOptions) -> Iterator[Batch]:
            inputs = torch.randn(EPOCH, self.width).split(size)
            drawn = torch.rand(len(inputs), self.width)
            moved = drawn <= drawn.kthvalue(self.width // PARTS, dim=1, keepdim=True).values
            return zip(inputs, moved, strict=True)

        return Target(
            model,
            torch.optim.SGD(model.parameters(), lr=RATE),
            lambda size: (torch.randn(size, self.width), torch.arange(self.width) < self.width // PARTS),
            lambda model, batch: model(batch),
            load=load,
            validate=held_out,
        )

    def slowness(self, batch: float) -> float:
        """Updates at the best rate that divide the expected loss by e."""
        return -1 / math.log1p(-1 / (PARTS * (1 + (self.width + 1) / batch)))

    def critical(self) -> float:
        """E_min / S_min."""
        tiny, huge = 1e-6, 1e12
        return tiny * self.slowness(tiny) / self.slowness(huge)

    def fitted(self) -> float:
        """What the fit makes of exact points."""
        return fit_tradeoff([(size, self.slowness(size)) for size in SIZES]).critical

    def branch_critical(self, began: float, samples: int, tolerance: float) -> float:
        """Where the best loss is `tolerance` above the base batch's, for branches that begin at a loss."""

        def loss(batch: float) -> float:
            return began * math.exp(-samples / batch / self.slowness(batch))

        return rising(loss, loss(BASE) + tolerance)


def held_out(model: nn.Module) -> float:
    """Expected for any example."""
    (weight,) = model.parameters()
    return float(weight.detach().square().sum()) / 2


def rising(function: Callable[[float], float], value: float) -> float:
    """Where a rising function of a positive number has the value."""
    low, high = 1e-6, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return math.sqrt(low * high)


def tradeoff_run(problem: Problem, seed: int) -> dict[str, Any]:
    base = Setting(BASE, base_examples=BASE, seed=100 * seed)
    budget = SIZES[-1] * 128
    found = measure_tradeoff(
        problem.target, SIZES, GOAL, base, Plan(budget, evaluations=budget // 64), seeds=SEEDS, refine=2
    )
    curve, planted = found.tradeoff, problem.critical()
    if curve is None:
        return row("trade-off", planted, math.nan, None, found.samples_spent, found.unfitted)
    exact = f"exact points fit {problem.fitted() / planted - 1:+.1%}"
    return row("trade-off", planted, curve.critical, curve.critical_interval, found.samples_spent, exact)


def branched_run(problem: Problem, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    target = problem.target()
    before = BEFORE[seed % len(BEFORE)]
    base = Setting(BASE, base_examples=BASE, seed=seed)
    if before:
        train(target, base, Plan(before, evaluations=0))
    began = held_out(target.model)
    plan = Plan(EPOCH, evaluations=1)
    found = branched(target, base, plan, multiples=MULTIPLES, orders=ORDERS, search_orders=SEARCH_ORDERS)
    planted = problem.branch_critical(began, EPOCH, found.tolerance)
    return row("branches", planted, found.critical, found.interval, found.samples_spent, found.bound)


def row(
    name: str, planted: float, found: float, interval: Iterable[float] | None, spent: int, said: str = ""
) -> dict[str, Any]:
    low, high = interval or (math.nan, math.nan)
    error = found / planted - 1
    print(
        f"{name:9}  planted {planted:7.1f}  found {found:7.1f} ({low:.1f} to {high:.1f})  {error:+6.1%}  "
        f"{spent:,} examples  {said}",
        flush=True,
    )
    return {"planted": planted, "found": found, "error": error, "covered": low <= planted <= high, "spent": spent}


def main() -> None:
    count = QUICK_RUNS if arguments(__doc__ or "").quick else RUNS
    torch.set_num_threads(1)
    gc.freeze()  # what is imported needs no second look
    draw = random.Random(DRAW)
    problems = [Problem(draw.randrange(WIDTHS[0], WIDTHS[1] + 1, PARTS)) for _ in range(count)]
    began = time.perf_counter()
    result: dict[str, Any] = {"runs": count}
    for name, run in (("tradeoff", tradeoff_run), ("branched", branched_run)):
        rows = [run(problem, seed) for seed, problem in enumerate(problems, start=FIRST_SEED)]
        result[f"{name}_within_25"] = sum(abs(each["error"]) <= WITHIN for each in rows)
        result[f"{name}_covered"] = sum(each["covered"] for each in rows)
        result[f"{name}_rows"] = rows
    least = min(result["tradeoff_within_25"], result["branched_within_25"])
    result["passed"] = least >= 9 if count == RUNS else None  # two runs can't tell 9 of 10
    result["seconds"] = time.perf_counter() - began
    finish(result)


if __name__ == "__main__":
    main()
