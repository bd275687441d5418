"""The gradient of any split is that of the whole."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from stoker.batch import nest
from stoker.batch.accumulation import accumulate, windows
from stoker.errors import ConfigError, RunError
from tests.batch import models


def gradients(model: nn.Module) -> list[Tensor]:
    taken = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return taken


def whole(setup: models.Setup, batch: Any) -> list[Tensor]:
    setup.model.zero_grad()
    setup.loss(setup.model, batch).backward()
    return gradients(setup.model)


def furthest(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    scale = max(tensor.abs().max().item() for tensor in others)
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True)) / scale


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [nest.take(batch, range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def trimmed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Padded to its own longest only, as a data loader would."""
    width = int((batch["ids"] != 0).any(0).nonzero().max()) + 1
    return {key: value[:, :width] for key, value in batch.items()}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(2, 9), min_size=2, max_size=9),
    st.integers(1, 5),
    st.integers(0, 3),
    st.booleans(),
)
def test_peer_fault_01_any_split_of_ragged_texts_gives_the_gradient_of_the_whole(
    lengths: list[int], microbatch_examples: int, seed: int, trim: bool
) -> None:
    setup = models.transformer(seed)
    batch = models.ragged(lengths, seed=seed)
    expected = whole(setup, batch)
    rows = range(len(lengths))
    parts = [
        nest.take(batch, rows[start : start + microbatch_examples]) for start in rows[::microbatch_examples]
    ]  # the last is uneven
    done = accumulate(
        setup.model, setup.loss, map(trimmed, parts) if trim else parts, count=models.labels_after_the_first
    )
    assert furthest(gradients(setup.model), expected) <= 1e-10
    assert done.count == sum(lengths) - len(lengths)
    assert done.loss.item() == pytest.approx(setup.loss(setup.model, batch).item(), rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([models.mlp, models.conv]), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 3)
)
def test_any_uneven_split_by_examples_gives_the_gradient_of_the_whole(make: Any, sizes: list[int], seed: int) -> None:
    setup = make(seed)
    batch = setup.make_batch(sum(sizes))
    expected = whole(setup, batch)
    accumulate(setup.model, setup.loss, cut(batch, sizes))
    assert furthest(gradients(setup.model), expected) <= 1e-10


def test_the_plain_mean_of_means_is_far_off() -> None:
    setup = models.transformer()
    batch = models.ragged([9, 9, 2, 2])
    expected = whole(setup, batch)
    for part in cut(batch, [2, 2]):
        (setup.loss(setup.model, part) / 2).backward()
    assert furthest(gradients(setup.model), expected) > 0.05


def test_peer_fault_03_padding_does_not_move_the_gradient() -> None:
    setup = models.transformer()
    batch = models.ragged([9, 3, 2, 2])
    expected = whole(setup, batch)
    wider = {"ids": F.pad(batch["ids"], (0, 5)), "labels": F.pad(batch["labels"], (0, 5), value=models.IGNORED)}
    for parts in (cut(wider, [1, 3]), [trimmed(part) for part in cut(batch, [1, 3])]):
        accumulate(setup.model, setup.loss, parts, count=models.labels_after_the_first)
        assert furthest(gradients(setup.model), expected) <= 1e-10


def test_peer_fault_04_100_tokens_at_half_and_900_at_point_three_are_point_32() -> None:
    model = nn.Linear(1, 1)
    losses = {100: 0.5, 900: 0.3}
    done = accumulate(model, lambda m, n: m.bias.sum() * 0 + losses[n], [100, 900], count=lambda n: n)
    assert done.loss.item() == pytest.approx(0.32)
    assert done.count == 1000


@pytest.mark.parametrize("microbatches_per_update", [1, 2, 3, 7, 12])
def test_peer_fault_05_the_update_does_not_depend_on_accumulation(microbatches_per_update: int) -> None:
    setup = models.transformer()
    batch = models.ragged([5, 9, 2, 4, 7, 3, 9, 2, 6, 8, 2, 5])
    expected = whole(setup, batch)
    size = -(-12 // microbatches_per_update)
    parts = [nest.take(batch, range(12)[start : start + size]) for start in range(0, 12, size)]
    accumulate(setup.model, setup.loss, parts, count=models.labels_after_the_first)
    assert furthest(gradients(setup.model), expected) <= 1e-10


def test_peer_fault_06_tokens_and_texts_without_loss_leave_the_denominator() -> None:
    setup = models.transformer()
    batch = models.ragged([9, 4, 7, 3, 5])
    batch["labels"][1] = models.IGNORED  # a rejected text, alone in its micro-batch: its mean would be NaN
    batch["labels"][2, 4:] = models.IGNORED  # a truncated one
    expected = whole(setup, batch)
    done = accumulate(setup.model, setup.loss, cut(batch, [1, 1, 2, 1]), count=models.labels_after_the_first)
    assert (done.microbatches, done.count) == (3, 8 + 3 + 2 + 4)
    assert furthest(gradients(setup.model), expected) <= 1e-10


def test_a_summed_loss_is_divided_by_all_units_or_stays_a_sum() -> None:
    setup = models.transformer()
    batch = models.ragged([9, 4, 7, 3, 5])
    mean = whole(setup, batch)
    accumulate(setup.model, models.token_sum, cut(batch, [2, 3]), count=models.labels_after_the_first, reduction="sum")
    assert furthest(gradients(setup.model), mean) <= 1e-10
    done = accumulate(setup.model, models.token_sum, cut(batch, [2, 3]), reduction="sum")
    assert furthest(gradients(setup.model), [gradient * (28 - 5) for gradient in mean]) <= 1e-10
    assert done.loss.item() == pytest.approx(models.token_sum(setup.model, batch).item())


def test_counts_may_be_given_as_numbers() -> None:
    setup = models.transformer()
    batch = models.ragged([9, 4, 7])
    expected = whole(setup, batch)
    accumulate(setup.model, setup.loss, cut(batch, [1, 2]), count=[8, 9])
    assert furthest(gradients(setup.model), expected) <= 1e-10


def test_clipping_the_whole_gradient_after_accumulating_is_clipping_that_of_the_batch() -> None:
    setup = models.mlp()
    batch = setup.make_batch(7)
    whole(setup, batch)
    setup.loss(setup.model, batch).backward()
    norm = nn.utils.clip_grad_norm_(setup.model.parameters(), 0.1)
    expected = gradients(setup.model)
    accumulate(setup.model, setup.loss, cut(batch, [3, 3, 1]))
    assert nn.utils.clip_grad_norm_(setup.model.parameters(), 0.1).item() == pytest.approx(norm.item())
    assert furthest(gradients(setup.model), expected) <= 1e-10


def test_with_a_scaler_the_unscaled_gradient_is_that_of_the_whole() -> None:
    setup = models.mlp()
    setup.model.float()
    inputs, labels = setup.make_batch(7)
    batch = (inputs.float(), labels)
    expected = whole(setup, batch)
    optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    done = accumulate(setup.model, setup.loss, cut(batch, [3, 3, 1]), scaler=scaler)
    scaler.unscale_(optimizer)
    assert furthest(gradients(setup.model), expected) <= 1e-5
    assert done.loss.item() == pytest.approx(setup.loss(setup.model, batch).item(), rel=1e-5)


def test_gradients_that_are_there_are_added_to() -> None:
    setup = models.mlp()
    batch = setup.make_batch(4)
    expected = whole(setup, batch)
    accumulate(setup.model, setup.loss, cut(batch, [2, 2]))
    accumulate(setup.model, setup.loss, cut(batch, [3, 1]))
    assert furthest(gradients(setup.model), [2 * gradient for gradient in expected]) <= 1e-10


def test_windows_end_with_what_is_left() -> None:
    assert list(windows(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(windows([], 3)) == []
    with pytest.raises(ConfigError, match=r"microbatches_per_update = 0"):
        list(windows([1], 0))


def test_what_can_not_be_accumulated_says_why() -> None:
    setup = models.transformer()
    batch = models.ragged([3, 4])
    with pytest.raises(ConfigError, match=r"gives \[2, 2\] numbers, not the scalar .*: take their mean"):
        accumulate(
            setup.model, lambda m, b: F.mse_loss(m(b["ids"])[:, :2, 0], torch.zeros(2, 2), reduction="none"), [batch]
        )
    with pytest.raises(ConfigError, match=r"1 counts for 2 micro-batches: give one for each"):
        accumulate(setup.model, models.token_mean, [batch, batch], count=[1])
    with pytest.raises(ConfigError, match=r"counts -1.0 units"):
        accumulate(setup.model, models.token_mean, [batch], count=lambda b: -1)
    batch["labels"][:] = models.IGNORED
    for window in ([batch], []):
        with pytest.raises(RunError, match=r"without a single token or example: nothing to differentiate"):
            accumulate(setup.model, models.token_mean, window, count=models.labels_after_the_first)


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_with_ddp_gradients_are_exchanged_once_a_window(group_of_one: None) -> None:
    setup = models.transformer()
    batch = models.ragged([9, 4, 7, 3, 5])
    expected = whole(setup, batch)
    model = DistributedDataParallel(setup.model)
    exchanged: list[Tensor] = []

    def count_buckets(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        exchanged.append(bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, count_buckets)
    done = accumulate(model, setup.loss, cut(batch, [1, 1, 2, 1]), count=models.labels_after_the_first)
    assert (done.microbatches, len(exchanged)) == (4, 1)
    assert furthest(gradients(setup.model), expected) <= 1e-10
    batch["labels"][:] = models.IGNORED
    with pytest.raises(RunError, match="without a single token or example on rank"):
        accumulate(model, setup.loss, [batch], count=models.labels_after_the_first)


def test_wrappers_that_exchange_gradients_otherwise_are_refused() -> None:
    class Sharded(nn.Linear):
        def set_requires_gradient_sync(self, on: bool) -> None: ...

    with pytest.raises(ConfigError, match=r"Sharded exchanges gradients in its own way"):
        accumulate(Sharded(1, 1), models.classify, [])
