"""The KL leash with its defaults resolved."""

import pytest

from stoker.config.leash import describe
from stoker.config.load import from_dict

MINIMAL = {"name": "first", "task": {"sources": [{"path": "rows.jsonl"}]}}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "0.04 x k2 in the loss, by token"),
        (["kl.estimator=k3", "kl.coefficient=0.1"], "0.1 x k3 in the loss, by token"),
        (["algorithm.name=rloo", "kl.level=sequence"], "0.04 x k1 in the reward, by sequence"),
        (["kl.adaptive=true"], "0.04 x k2 in the loss, by token, adapted towards 6 nats per sequence"),
        (["algorithm.name=dapo"], "none (kl.coefficient = 0)"),
    ],
)
def test_the_leash_in_a_line(overrides: list[str], expected: str) -> None:
    assert describe(from_dict(MINIMAL, overrides)) == f"KL to the reference: {expected}"
