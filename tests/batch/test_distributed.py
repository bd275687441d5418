"""Updates on real ranks. No test depends on how long anything takes."""

import json
from pathlib import Path

import pytest

from stoker.batch.distributed import Distributed, Exchange, Point, distributed, fit_link
from stoker.batch.scope import Scope, predicted_all_reduce_s
from stoker.batch.target import Maker
from stoker.errors import ConfigError

MAKER = Maker(f"{Path(__file__).parent / 'makers.py'}:vectors")


def measured(**change: float) -> Distributed:
    """One rank: 10 ms + 10 ms a micro-batch; two ranks the same and 10 ms of exchange."""
    points = [
        Point(
            Scope(8, number, ranks),
            0.01 + 0.01 * number + 0.01 * (ranks - 1),
            0.01 + 0.01 * number,
            (0.1,),
            10**6,
            10**5,
        )
        for ranks in (1, 2)
        for number in (1, 4)
    ]
    exchange = Exchange(2, 4 * 10**6, 1, 0.011, 0.01, 4e8, 0.0, ((100, 0.1),))
    return Distributed(tuple(points), (exchange,), 0.1, "linear", 1)


def test_shares_efficiency_and_learning_rate_by_hand() -> None:
    made = measured()
    ranks = made.points[2]
    assert ranks.exchange_share == pytest.approx(1 / 3)  # 10 of 30 ms
    assert made.points[3].exchange_share == pytest.approx(1 / 6)
    assert made.efficiency(ranks) == pytest.approx(2 / 3)
    assert made.rate(ranks) == pytest.approx(0.2)
    assert made.points[3].examples_per_s == pytest.approx(8 * 4 * 2 / 0.06)


def test_more_microbatches_amortise_the_exchange() -> None:
    shares = dict(measured().amortised(2))
    assert shares[1] == pytest.approx(1 / 3)
    assert shares[8] == pytest.approx(1 / 10)  # 10 of 10 + 80 + 10 ms
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bandwidth_and_latency_come_back_from_the_ring_formula(ranks: int) -> None:
    probes = [(size, predicted_all_reduce_s(size, ranks, 3e9, 2e-5)) for size in (2**16, 2**20, 2**24)]
    assert fit_link(probes, ranks) == pytest.approx((3e9, 2e-5))


def test_a_link_without_latency_and_one_that_makes_no_sense() -> None:
    bandwidth, latency = fit_link([(2**16, 0.9e-4), (2**20, 1.6e-3), (2**24, 3e-2)], 2)
    assert latency == 0 and 4e8 < bandwidth < 8e8
    with pytest.raises(ConfigError, match="take no longer for more bytes"):
        fit_link([(2**16, 1.0), (2**20, 0.1)], 2)


@pytest.mark.slow
def test_two_real_ranks_after_one() -> None:
    made = distributed(MAKER, size=4, ranks=(2,), microbatches=(1, 3), updates=2)
    assert [(p.scope.data_parallel_ranks, p.scope.examples_per_update) for p in made.points] == [
        (1, 4),
        (1, 12),
        (2, 8),
        (2, 24),
    ]
    assert all(len(point.updates_s) == 2 and point.update_s > 0 and point.peak_bytes > 10**7 for point in made.points)
    [exchange] = made.exchanges
    assert exchange.gradient_bytes == 4 * (6 * 16 + 16 + 16 + 16 + 16 * 5 + 5)
    assert exchange.predicted_s > 0 and exchange.measured_s > 0 and exchange.calls == 1
    assert (made.learning_rate, made.rule) == (0.1, "linear")
    assert "24 examples per update are 6 times the baseline's 4: learning rate 0.1 becomes 0.6" in made.warnings[0]
    json.dumps(made.to_json())
    assert "global = per micro-batch x micro-batches x data-parallel ranks" in str(made)


def test_numbers_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"ranks = \(1, 2\): from 2, as one rank is always measured first"):
        distributed(MAKER, size=4, ranks=(1, 2))
    with pytest.raises(ConfigError, match=r"size = 0, .* each at least 1"):
        distributed(MAKER, size=0)
