"""What `accumulate` tells a noise meter, against the gradient of each micro-batch taken alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stoker.batch import nest
from stoker.batch.accumulation import accumulate
from stoker.batch.ranks import launch
from stoker.errors import ConfigError, RunError
from tests.batch import models
from tests.batch.meters import Kept

LENGTHS = [9, 4, 7, 3, 5, 8]
ROWS = [[0], [1, 2], [3, 4, 5]]
COUNTS = [8.0, 9.0, 13.0]


def squared_alone(setup: models.Setup, batch: Any) -> float:
    setup.model.zero_grad()
    setup.loss(setup.model, batch).backward()
    found = sum(float(p.grad.abs().square().sum()) for p in setup.model.parameters() if p.grad is not None)
    setup.model.zero_grad()
    return found


def expected(setup: models.Setup, batch: Any, rows: Sequence[Sequence[int]]) -> tuple[list[float], float]:
    return [squared_alone(setup, nest.take(batch, part)) for part in rows], squared_alone(setup, batch)


def given(setup: models.Setup, window: Sequence[Any], **options: Any) -> tuple[list[float], float, list[float]]:
    meter = Kept()
    accumulate(setup.model, setup.loss, window, noise=meter, **options)
    [only] = meter.given
    setup.model.zero_grad()
    return only


@pytest.mark.parametrize("how", ["mean", "sum over counts", "plain sum"])
def test_each_micro_batch_and_the_whole_as_means_over_their_units(how: str) -> None:
    setup = models.transformer()
    batch = models.ragged(LENGTHS)
    squared, whole = expected(setup, batch, ROWS)
    window = [nest.take(batch, part) for part in ROWS]
    if how == "mean":
        found = given(setup, window, count=models.labels_after_the_first)
    else:
        setup.loss = models.token_sum
        counts = COUNTS if how == "sum over counts" else None
        found = given(setup, window, count=counts, reduction="sum")
    if how == "plain sum":  # per example there, so that a mean over tokens is off by tokens per example
        examples = [1.0, 2.0, 3.0]
        squared = [s * (n / m) ** 2 for s, n, m in zip(squared, COUNTS, examples, strict=True)]
        assert found == (pytest.approx(squared), pytest.approx(whole * (30 / 6) ** 2), examples)
    else:
        assert found == (pytest.approx(squared), pytest.approx(whole), COUNTS)


def test_the_gradient_is_the_same_to_the_bit_and_nothing_stays_on_the_model() -> None:
    setup = models.transformer()
    window = [nest.take(models.ragged(LENGTHS), part) for part in ROWS]
    taken: list[list[Tensor]] = []
    for meter in (None, Kept()):
        accumulate(setup.model, setup.loss, window, noise=meter)
        taken.append([p.grad.clone() for p in setup.model.parameters() if p.grad is not None])
        setup.model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*taken, strict=True))
    assert not any(p._backward_hooks for p in setup.model.parameters())


def test_hooks_go_where_the_loss_fails() -> None:
    setup = models.mlp()
    with pytest.raises(ConfigError, match="not the scalar"):
        accumulate(setup.model, lambda m, b: m(b[0]), [setup.make_batch(2)] * 2, noise=Kept())
    assert not any(p._backward_hooks for p in setup.model.parameters())


def test_a_loss_scalers_factor_is_undone() -> None:
    setup = models.mlp()
    setup.model.float()
    inputs, labels = setup.make_batch(7)
    batch = (inputs.float(), labels)
    rows = [[0, 1, 2], [3, 4, 5, 6]]
    squared, whole = expected(setup, batch, rows)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = given(setup, [nest.take(batch, part) for part in rows], scaler=scaler)
    assert found == (pytest.approx(squared, rel=1e-4), pytest.approx(whole, rel=1e-4), [3.0, 4.0])


def test_empty_micro_batches_are_no_parts() -> None:
    setup = models.transformer()
    batch = models.ragged(LENGTHS)
    batch["labels"][1:3] = models.IGNORED
    window = [nest.take(batch, part) for part in ROWS]
    assert given(setup, window, count=models.labels_after_the_first)[2] == [8.0, 13.0]
    setup.loss = models.token_sum
    assert given(setup, window, count=models.labels_after_the_first, reduction="sum")[2] == [8.0, 13.0]


class Odd(nn.Module):
    """A tied weight, sparse gradients, a complex and a frozen parameter, one in bfloat16, and one that isn't used."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
        self.table = nn.Embedding(6, 4, sparse=True, dtype=torch.float64)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.frozen = nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)
        self.sixteen = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = (self.tied[ids] + self.table(ids)) * (self.phase.abs() + self.frozen) * self.sixteen
        return x @ self.tied.T


def test_parameters_of_every_kind() -> None:
    torch.manual_seed(0)
    setup = models.Setup(Odd(), lambda m, ids: F.cross_entropy(m(ids), ids), lambda size: torch.arange(size) % 6)
    batch = torch.tensor([0, 1, 1, 3, 5])
    rows = [[0, 1], [2, 3, 4]]
    squared, whole = [], 0.0
    for part in [*rows, range(5)]:
        setup.loss(setup.model, batch[list(part)]).backward()
        grads = [
            p.grad.to_dense() if p.grad.is_sparse else p.grad for p in setup.model.parameters() if p.grad is not None
        ]
        squared.append(sum(float(g.abs().double().square().sum()) for g in grads))
        setup.model.zero_grad()
    *squared, whole = squared
    found = given(setup, [batch[part] for part in rows])
    assert found == (pytest.approx(squared, rel=1e-2), pytest.approx(whole, rel=1e-2), [2.0, 3.0])


def test_gradients_from_before_are_refused_and_zeros_are_not() -> None:
    setup = models.mlp()
    window = [setup.make_batch(2), setup.make_batch(3)]
    accumulate(setup.model, setup.loss, window)
    with pytest.raises(ConfigError, match=r"0.weight has a gradient from before: .* call zero_grad\(\) first"):
        accumulate(setup.model, setup.loss, window, noise=Kept())
    setup.model.zero_grad(set_to_none=False)
    given(setup, window)


def test_checkpointing_that_gives_a_gradient_in_pieces_is_refused() -> None:
    model = nn.Linear(4, 4).double()

    def loss(reentrant: bool) -> Any:
        def twice(model: nn.Module, x: Tensor) -> Tensor:
            hidden = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
            return checkpoint(model, hidden, use_reentrant=reentrant).square().mean()

        return twice

    window = [torch.randn(2, 4, dtype=torch.float64) for _ in range(2)]
    with pytest.raises(RunError, match=r"gets its gradient in several pieces .* use_reentrant=False"):
        accumulate(model, loss(True), window, noise=Kept())
    model.zero_grad()
    accumulate(model, loss(False), window, noise=Kept())


def test_two_real_ranks_tell_each_meter_the_micro_batches_of_both() -> None:
    setup = models.transformer()
    rows = [[[0], [1, 2]], [[3, 4, 5]]]
    squared, whole = expected(setup, models.ragged(LENGTHS), ROWS)
    job = {"lengths": LENGTHS, "rows": rows, "watching": [0, 1]}
    answers = launch("tests.batch.noise_rank", 2, job, {}, 60.0)
    for answer in answers:
        [found] = answer["given"]
        assert found == [pytest.approx(squared), pytest.approx(whole), COUNTS]


def test_a_meter_on_one_rank_alone_is_an_error_on_all() -> None:
    job = {"lengths": LENGTHS, "rows": [[[0], [1]], [[2], [3]]], "watching": [1]}
    with pytest.raises(RunError, match=r"some ranks measure the noise of this update and others don't"):
        launch("tests.batch.noise_rank", 2, job, {}, 60.0)
