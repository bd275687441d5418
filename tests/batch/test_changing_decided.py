"""Batches whose sizes are decided while they are drawn: every example once an epoch, the same after a resume anywhere.

What decides is made of the examples themselves, so that one that is lost, repeated or moved changes all that follows.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from stoker.batch.changing import ChangingBatches, Granularity, Last
from stoker.batch.controllers.by_noise import ByNoise
from stoker.batch.controllers.by_plateau import ByPlateau
from stoker.batch.noise import NoiseSample, NoiseScale
from stoker.batch.ranks import launch
from stoker.batch.stages import Stages
from tests.batch.places import Places

Sizes = ByNoise | ByPlateau
Decide = Callable[[Sizes, list[int], ChangingBatches], None]


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def by_noise(ranks: int = 1) -> ByNoise:
    return ByNoise(4 * ranks, lowest=2 * ranks, highest=12 * ranks, multiple=ranks, wait=2, hysteresis=1.1)


def by_plateau(ranks: int = 1) -> ByPlateau:
    return ByPlateau(2 * ranks, 12 * ranks, patience=1, times=1.5, multiple=ranks)


def decide(sizes: Sizes, indices: list[int], batches: ChangingBatches) -> None:
    """From the update's own examples, as a training would."""
    if isinstance(sizes, ByPlateau):
        sizes.observe(sum(indices) / len(indices), batches.undrawn)
        return
    noise = NoiseScale(smoothing=1)
    for place in range(20):
        noise.add(NoiseSample(float(sum(indices) % 40) + place % 2, 1.0 + 0.01 * (place % 3)))
    sizes.observe(noise.estimate(), batches.undrawn)


class Training:
    """`updates` give the indices of each update; in `state` is all that it takes to go on."""

    def __init__(self, sizes: Sizes, examples: int, workers: int | None, granularity: Granularity = "step") -> None:
        self.sizes = sizes
        self.batches = ChangingBatches(examples, sizes, granularity=granularity, seed=7)
        self._loader: Any = self.batches
        if workers is not None:
            self._loader = DataLoader(Places(examples), batch_sampler=self.batches, num_workers=workers)

    def updates(self) -> Iterator[list[int]]:
        while True:
            for batch in self.batches.through(self._loader):
                indices = batch if isinstance(batch, list) else batch.tolist()
                decide(self.sizes, indices, self.batches)
                yield indices

    def state(self) -> str:
        return json.dumps({"batches": self.batches.state_dict(), "sizes": self.sizes.state_dict()})

    def load(self, state: str) -> None:
        saved = json.loads(state)
        self.sizes.load_state_dict(saved["sizes"])
        self.batches.load_state_dict(saved["batches"])


def run(made: Callable[[], Training], stops: list[int]) -> list[list[int]]:
    """As many updates as the stops name, a new training from the state at each."""
    found: list[list[int]] = []
    state = None
    for stop in stops:
        training = made()
        if state is not None:
            training.load(state)
        updates = training.updates()
        found += [next(updates) for _ in range(stop)]
        state = training.state()
        updates.close()
    return found


def epochs_of(found: list[list[int]], examples: int) -> list[list[int]]:
    """The examples, epoch by epoch; the last one may be incomplete."""
    drawn = flat(found)
    return [drawn[start : start + examples] for start in range(0, len(drawn), examples)]


@settings(deadline=None)
@given(
    st.sampled_from([by_noise, by_plateau]),
    st.integers(3, 60),
    st.sampled_from(["epoch", "step"]),
    st.lists(st.integers(1, 25), min_size=1, max_size=4),
)
def test_decided_sizes_lose_and_repeat_nothing_and_resume_anywhere(
    sizes: Callable[[], Sizes], examples: int, granularity: Granularity, stops: list[int]
) -> None:
    def made() -> Training:
        return Training(sizes(), examples, None, granularity)

    whole = run(made, [sum(stops)])
    for epoch in epochs_of(whole, examples):
        assert len(set(epoch)) == len(epoch) and set(epoch) <= set(range(examples))
    assert run(made, stops) == whole


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("sizes", [by_noise, by_plateau])
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4])
def test_decided_sizes_with_workers_that_fetch_ahead(sizes: Callable[[], Sizes], workers: int) -> None:
    def made() -> Training:
        return Training(sizes(), 53, workers)

    whole = run(made, [24])
    assert len(set(map(len, whole))) > 2, "sizes change"
    for epoch in epochs_of(whole, 53):
        assert len(set(epoch)) == len(epoch)
    assert run(made, [5, 10, 9]) == whole


def test_a_decision_holds_from_the_first_update_that_no_worker_has_been_given() -> None:
    training = Training(by_plateau(), 53, 2)
    for _, _ in zip(training.updates(), range(8), strict=False):
        step = training.batches.progress.step
        assert training.batches.undrawn.step == step + 4, "two workers fetch two batches each"
        assert all(switch.step <= step + 4 for switch in training.sizes.switches)
    assert training.sizes.switches


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 80), st.integers(1, 8), st.booleans(), st.integers(0, 3))
def test_with_one_size_ranks_draw_as_distributed_samplers_do(
    ranks: int, examples: int, each: int, drop: bool, epoch: int
) -> None:
    """Unshuffled, as the two shuffle by generators of their own: the same share of each rank, in the same order, and
    the same examples twice where ranks don't divide them.
    """
    if drop:
        examples = (
            max(1, examples // (ranks * each)) * ranks * each
        )  # a DistributedSampler drops examples, this batches
    last: Last = "drop" if drop else "repeat"
    shares = []
    for rank in range(ranks):
        batches = ChangingBatches(examples, each * ranks, shuffle=False, last=last, rank=rank, ranks=ranks)
        for _ in range(epoch):
            list(batches.through(batches))
        found = list(batches.through(batches))
        places = Places(examples)
        sampler: Any = DistributedSampler(places, ranks, rank, shuffle=False, drop_last=drop)
        sampler.set_epoch(epoch)
        assert found == [batch.tolist() for batch in DataLoader(places, each, sampler=sampler)]
        shares.append(flat(found))
    counts = Counter(flat(shares))
    assert set(counts) == set(range(examples)) and sum(counts.values()) == -(-examples // ranks) * ranks


@given(st.integers(1, 4), st.integers(8, 60), st.integers(0, 3))
def test_a_shuffled_epoch_is_one_order_dealt_to_the_ranks(ranks: int, each: int, seed: int) -> None:
    examples = each * ranks
    schedule = Stages((2 * ranks, 3 * ranks, ranks), (0, 2, 5), "step")
    alone = ChangingBatches(examples, schedule, granularity="step", seed=seed)
    dealt = [
        ChangingBatches(examples, schedule, granularity="step", seed=seed, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    for _ in range(2):
        whole = list(alone.through(alone))
        shares = [list(one.through(one)) for one in dealt]
        for place, indices in enumerate(whole):
            for rank, share in enumerate(shares):
                assert share[place] == indices[rank::ranks]


def test_two_real_ranks_draw_every_example_once_and_resume() -> None:
    """Sizes are decided by a loss that both ranks share."""
    cases = [
        {"examples": 60, "last": "keep", "workers": 0},
        {"examples": 61, "last": "repeat", "workers": 2},
    ]
    found = launch("tests.batch.changing_rank", 2, {"cases": cases}, {}, 60.0)
    for case, *ranks in zip(cases, *(one["answers"] for one in found), strict=True):
        assert ranks[0]["state"] == ranks[1]["state"], "both decide the same"
        assert json.loads(ranks[0]["state"])["sizes"]["switches"], "sizes change"
        for rank in ranks:
            assert (rank["parts"], rank["end"]) == (rank["whole"], rank["state"])
        order = [
            place
            for shares in zip(*(rank["whole"] for rank in ranks), strict=True)
            for places in zip(*shares, strict=True)
            for place in places
        ]
        examples = int(case["examples"])
        total = examples + examples % 2
        assert len(order) > total
        counts = Counter(order[:total])
        assert set(counts) == set(range(examples)) and sum(counts.values()) == total
