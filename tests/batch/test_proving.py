"""Planted faults are found, named and placed; right set-ups raise no alarm."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stoker.batch.accumulation import accumulate
from stoker.batch.proof import Proof
from stoker.batch.proving import prove
from stoker.batch.target import Maker, Target
from stoker.errors import ConfigError, RunError
from tests.batch import models


def target(setup: models.Setup, **fields: Any) -> Target:
    given = {"make_batch": setup.make_batch, "loss": setup.loss, "count": setup.count} | fields
    return Target(setup.model, torch.optim.SGD(setup.model.parameters(), lr=0.1), **given)


def with_layer(layer: nn.Module) -> Target:
    """An MLP whose module `1` is the layer, on 16 channels."""
    setup = models.mlp()
    setup.model = nn.Sequential(nn.Linear(6, 16), layer, nn.Tanh(), nn.Linear(16, 5)).double()
    return target(setup)


def named(proof: Proof) -> list[tuple[str, str]]:
    return [(cause.kind, cause.place) for cause in proof.causes]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [models.mlp, models.conv, models.transformer])
@pytest.mark.parametrize("size", [2, 7])
def test_right_set_ups_raise_no_alarm(make: Callable[[int], models.Setup], seed: int, size: int) -> None:
    proof = prove(target(make(seed)), size=size)
    assert named(proof) == []
    assert proof.equal and "to rounding" in proof.verdict
    assert proof.largest is not None and proof.largest.relative <= 1e-10
    assert all(trial.gaps[0].relative <= 1e-10 for trial in proof.trials)


def test_every_split_is_reported_with_each_parameter() -> None:
    proof = prove(target(models.mlp()), size=7)
    assert [str(trial.split) for trial in proof.trials] == ["4 + 3", "3 + 3 + 1", "7 x 1"]
    assert {gap.parameter for gap in proof.trials[0].gaps} == {
        "0.weight", "0.bias", "3.weight", "3.bias", "4.weight", "4.bias",
    }  # fmt: skip
    assert [str(trial.split) for trial in prove(target(models.mlp()), size=7, splits=(2,)).trials] == ["2 + 2 + 2 + 1"]


def test_batch_norm_is_named() -> None:
    proof = prove(target(models.conv(norm=nn.BatchNorm2d)), size=8)
    assert named(proof) == [("coupled examples", "1"), ("coupled examples", "4")]
    assert not proof.equal and proof.verdict.startswith("NOT")
    assert "BatchNorm2d normalises by mean and variance of the micro-batch" in str(proof)
    assert "GroupNorm or LayerNorm" in proof.causes[0].fix


def test_batch_norm_in_evaluation_is_right() -> None:
    setup = models.conv(norm=nn.BatchNorm2d)
    setup.model.eval()
    assert prove(target(setup), size=8).equal


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class ByPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(len(x), dtype=x.dtype)[:, None]


@pytest.mark.parametrize("layer", [Centred(), ByPlace()])
def test_a_layer_of_ones_own_that_couples_examples_is_placed(layer: nn.Module) -> None:
    proof = prove(with_layer(layer), size=8)
    assert named(proof) == [("coupled examples", "1")]
    assert type(layer).__name__ in proof.causes[0].what


def test_coupling_in_the_outermost_forward_is_the_models() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.batch_norm(self.first(x), None, None, training=True))

    setup = models.mlp()
    setup.model = Functional().double()
    assert named(prove(target(setup), size=8)) == [("coupled examples", "the model")]


def contrastive(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    vectors = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))


def two_denominators(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return models.token_mean(model, batch) + model(batch["ids"])[:, 0].pow(2).mean()


def test_a_loss_that_compares_examples_is_named() -> None:
    setup = models.mlp()
    setup.loss = contrastive
    assert named(prove(target(setup), size=8)) == [("coupled examples", "the loss")]
    setup = models.transformer()
    setup.loss = two_denominators
    assert named(prove(target(setup), size=8)) == [("coupled examples", "the loss")]


def test_a_loss_that_normalises_the_batch_before_the_model_is_named() -> None:
    setup = models.mlp()
    setup.loss = lambda model, batch: models.classify(model, (batch[0] / batch[0].abs().mean(0), batch[1]))
    assert named(prove(target(setup), size=8)) == [("coupled examples", "the loss")]


def test_a_mean_over_ragged_tokens_is_named_with_its_count() -> None:
    proof = prove(target(models.transformer(), count=None), size=8)
    assert named(proof) == [("per-microbatch mean", "the loss")]
    assert "count=lambda batch: (batch['labels'][:, 1:] != -100).sum()" in proof.causes[0].fix
    assert all(trial.corrected is not None and trial.corrected.relative <= 1e-10 for trial in proof.trials)
    assert proof.largest is not None and proof.largest.relative > 0.05


def test_a_part_without_a_token_is_no_fault() -> None:
    batch = models.ragged([9, 3, 7, 2, 8, 4, 9, 5])
    batch["labels"][6:] = models.IGNORED
    assert prove(target(models.transformer(), make_batch=lambda size: batch), size=8).equal


def test_tokens_alike_can_not_tell_and_the_report_says_so() -> None:
    setup = models.transformer()
    proof = prove(target(setup, count=None, make_batch=lambda size: models.ragged([6] * size)), size=8)
    assert proof.equal
    assert "every example of this batch holds as many tokens as the others" in proof.notes[0]


def test_a_sum_is_found_to_be_one() -> None:
    setup = models.transformer()
    setup.loss = models.token_sum
    proof = prove(target(setup, count=None), size=8)
    assert named(proof) == [("wrong weights", "the loss")]
    assert "reduction='sum'" in proof.causes[0].fix
    loop = lambda model, parts: accumulate(model, models.token_sum, parts, reduction="sum")  # noqa: E731
    assert prove(target(setup, count=None, accumulate=loop), size=8).equal


def test_a_count_of_the_wrong_tokens_is_named() -> None:
    proof = prove(target(models.transformer(), count=lambda batch: batch["labels"].numel()), size=8)
    assert named(proof) == [("wrong weights", "the loss")]
    assert proof.causes[0].what == (
        "weighed by the target's count, but right is labels of batch['labels'] that aren't -100 after the first place"
    )


def padded_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return models.token_sum(model, batch) / batch["labels"].numel()


def trimming(batch: dict[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    taken = {key: value[list(rows)] for key, value in batch.items()}
    width = int((taken["ids"] != 0).any(0).nonzero().max()) + 1
    return {key: value[:, :width] for key, value in taken.items()}


def test_peer_fault_03_a_loss_divided_by_the_padded_width_is_found() -> None:
    setup = models.transformer()
    setup.loss, setup.make_batch = padded_mean, lambda size: models.ragged([9, 9, 9, 3, 3, 3, 2, 2])
    proof = prove(target(setup, count=None, take=trimming), size=8)
    assert named(proof) == [("wrong weights", "the loss")]
    assert "rows x padded width" in proof.causes[0].what
    assert prove(target(models.transformer(), take=trimming), size=8).equal


def test_dropout_is_named_and_equal_in_expectation() -> None:
    proof = prove(target(models.mlp(dropout=0.3)), size=8)
    assert named(proof) == [("random draws", "2")]
    assert "Dropout (p=0.3)" in proof.causes[0].what
    assert not proof.equal and proof.verdict.startswith("equal in expectation")
    assert proof.largest is not None and proof.largest.relative <= 1e-10


def test_dropout_inside_attention_is_placed() -> None:
    proof = prove(target(models.transformer(dropout=0.1)), size=8)
    assert {cause.kind for cause in proof.causes} == {"random draws"}
    assert "trunk.layers.1.self_attn" in {cause.place for cause in proof.causes}
    assert str(proof).count("random draws in") == 1


class NoisyInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class DroppedByPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else x * 2


def test_noise_is_a_draw_and_draws_of_python_too() -> None:
    assert named(prove(with_layer(NoisyInput()), size=8)) == [("random draws", "1")]
    proof = prove(with_layer(DroppedByPython()), size=8)
    assert named(proof) == [("random draws", "1")]
    assert "can't be repeated" in proof.notes[-1]


def test_draws_that_do_not_reach_the_loss_are_no_cause() -> None:
    class Idle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand_like(x)
            return x

    assert prove(with_layer(Idle()), size=8).equal


class Running(nn.Module):
    """Divides by a scale that it follows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean()
        return x / self.scale


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


def test_a_state_that_changes_between_calls_is_placed() -> None:
    proof = prove(with_layer(Running()), size=8)
    assert ("changing state", "1") in named(proof)
    assert "a buffer that its forward changes" in proof.causes[0].what
    proof = prove(with_layer(Counting()), size=8)
    assert named(proof) == [("changing state", "1")]
    assert "a state outside its buffers" in proof.causes[0].what
    assert proof.trials == () and proof.largest is None and not proof.equal


def test_a_loss_that_counts_its_calls_is_a_changing_state() -> None:
    setup, calls = models.mlp(), []

    def annealed(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return models.classify(model, batch) / len(calls)

    setup.loss = annealed
    assert named(prove(target(setup), size=8)) == [("changing state", "the loss")]


def plain_loop(divide: Callable[[int], float], clear: bool = False, clip: bool = False) -> Any:
    def loop(model: nn.Module, parts: Sequence[Any]) -> None:
        for part in parts:
            if clear:
                model.zero_grad()
            (models.token_mean(model, part) / divide(len(parts))).backward()
            if clip:
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    return loop


@pytest.mark.parametrize(
    ("loop", "kind", "words"),
    [
        (plain_loop(lambda k: k), "per-microbatch mean", "it weighs the micro-batches 0.3333, 0.3333, 0.3333;"),
        (plain_loop(lambda k: 1), "per-microbatch mean", "it weighs the micro-batches 1, 1, 1; right are"),
        (plain_loop(lambda k: k, clear=True), "wrong weights", "only the last is left, as after a zero_grad"),
        (plain_loop(lambda k: k, clip=True), "unknown", "no weighted sum of the micro-batches' gradients"),
    ],
)
def test_a_loop_of_ones_own_is_told_its_weights(loop: Any, kind: str, words: str) -> None:
    proof = prove(target(models.transformer(), accumulate=loop), size=8)
    assert named(proof) == [(kind, "the loop")]
    assert words in proof.causes[0].what


@pytest.mark.parametrize(
    ("power", "words"),
    [
        (0, "3 times too large, as accumulation is never divided"),
        (2, "0.3333 times too large, as accumulation is divided twice"),
    ],
)
def test_peer_fault_05_accumulation_divided_never_or_twice_is_named(power: int, words: str) -> None:
    setup = models.mlp()

    def loop(model: nn.Module, parts: Sequence[Any]) -> None:
        for part in parts:
            (models.classify(model, part) * len(part[1]) / 9 * len(parts) / len(parts) ** power).backward()

    proof = prove(target(setup, accumulate=loop), size=9)
    assert named(proof) == [("wrong weights", "the loop")]
    assert words in proof.causes[0].what


def test_a_right_loop_of_ones_own_raises_no_alarm() -> None:
    def loop(model: nn.Module, parts: Sequence[Any]) -> None:
        total = sum(models.labels_after_the_first(part) for part in parts)
        for part in parts:
            (models.token_sum(model, part) / total).backward()

    assert prove(target(models.transformer(), count=None, accumulate=loop), size=8).equal


def test_several_causes_are_all_found() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(17, 16), nn.BatchNorm1d(16), nn.Linear(16, 17)
            self.drop = nn.Dropout(0.2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.drop(self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)))

    setup = models.transformer()
    setup.model = Normed().double()
    proof = prove(target(setup, count=None), size=8)
    assert named(proof) == [
        ("random draws", "drop"),
        ("coupled examples", "norm"),
        ("per-microbatch mean", "the loss"),
    ]


def test_everything_is_afterwards_as_it_was() -> None:
    setup = models.conv(norm=nn.BatchNorm2d)
    setup.model.float()
    made = setup.make_batch(6)
    setup.make_batch = lambda size: (made[0].float(), made[1])
    setup.loss(setup.model, setup.make_batch(6)).backward()
    parameters = [(p, p.data_ptr(), p.detach().clone(), p.grad) for p in setup.model.parameters()]
    gradients = [p.grad.clone() for p in setup.model.parameters() if p.grad is not None]
    buffers = [buffer.clone() for buffer in setup.model.buffers()]
    states = torch.get_rng_state(), random.getstate()
    prove(target(setup), size=6)
    for (parameter, place, value, gradient), before in zip(parameters, gradients, strict=True):
        assert parameter.data_ptr() == place and torch.equal(parameter, value) and parameter.dtype == torch.float32
        assert parameter.grad is gradient and torch.equal(gradient, before)
    assert all(torch.equal(a, b) for a, b in zip(setup.model.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert setup.model.training


def test_in_training_precision_rounding_is_shown_beside() -> None:
    setup = models.mlp()
    setup.model.float()
    made = setup.make_batch(8)
    proof = prove(target(setup, make_batch=lambda size: (made[0].float(), made[1])), size=8)
    assert proof.equal and proof.precision == "float64"
    single = [trial for trial in proof.trials if trial.precision == "float32"]
    assert len(single) == 3
    assert 1e-9 < max(trial.gaps[0].relative for trial in single) < 1e-4


@pytest.mark.parametrize("right", [True, False])
def test_a_real_language_model_whose_logits_are_fp32(tiny_llama: nn.Module, right: bool) -> None:
    setup = models.transformer()
    setup.model = tiny_llama.train()
    setup.loss = lambda model, batch: model(input_ids=batch["ids"], labels=batch["labels"]).loss
    proof = prove(target(setup, count=models.labels_after_the_first if right else None), size=8)
    assert proof.precision == "float64"
    assert 1e-9 < proof.rounding < 1e-6  # the loss casts logits to fp32
    assert named(proof) == ([] if right else [("per-microbatch mean", "the loss")])


class OnlySingle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.eye(x.shape[1], dtype=torch.float32)


@pytest.mark.parametrize(("norm", "equal"), [(nn.LayerNorm(16), True), (nn.BatchNorm1d(16), False)])
def test_a_model_that_refuses_fp64_is_judged_in_its_own_precision(norm: nn.Module, equal: bool) -> None:
    setup = models.mlp()
    setup.model = nn.Sequential(nn.Linear(6, 16), OnlySingle(), norm, nn.Linear(16, 5)).float()
    made = setup.make_batch(8)
    proof = prove(target(setup, make_batch=lambda size: (made[0].float(), made[1])), size=8)
    assert (proof.precision, proof.equal) == ("float32", equal)
    assert "doesn't compute in fp64" in proof.notes[0]
    assert named(proof) == ([] if equal else [("coupled examples", "2")])


def test_sparse_gradients_and_parameters_without_one() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.idle, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(3, 3), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x).mean(1))

    setup = models.mlp()
    setup.model = Table().double()
    setup.make_batch = lambda size: (torch.arange(size * 3).reshape(size, 3) % 9, torch.arange(size) % 5)
    proof = prove(target(setup), size=6)
    assert proof.equal
    assert {gap.parameter for gap in proof.trials[0].gaps} == {"table.weight", "head.weight", "head.bias"}


def test_the_report_is_json_and_text() -> None:
    proof = prove(target(models.transformer(), count=None), size=8)
    read = json.loads(json.dumps(proof.to_json()))
    assert read["verdict"] == "NOT the gradient of the whole batch" and read["equal"] is False
    assert read["causes"][0]["kind"] == "per-microbatch mean"
    text = str(proof)
    assert "Accumulation of 8 examples: NOT" in text and "3 + 3 + 2" in text and "Fix: weigh by them" in text


def test_what_can_not_be_proven_says_why() -> None:
    right = target(models.mlp())
    with pytest.raises(ConfigError, match=r"size = 1: a batch of at least 2"):
        prove(right, size=1)
    with pytest.raises(ConfigError, match=r"splits holds 8: micro-batches of 1 to 7"):
        prove(right, size=8, splits=(4, 8))
    with pytest.raises(ConfigError, match=r"give a stoker.batch.Maker"):
        prove(right, size=8, ranks=(1, 2))
    with pytest.raises(ConfigError, match=r"ranks = \(9,\): from 1 to 8"):
        prove(right, size=8, ranks=(9,))
    with pytest.raises(ConfigError, match=r"make_batch\(8\) gave 4 examples"):
        prove(target(models.mlp(), make_batch=lambda size: models.mlp().make_batch(4)), size=8)
    with pytest.raises(ConfigError, match=r"a Workless has no model and loss"):
        prove(Maker("tests/batch/test_proving.py:Workless"), size=8)


class Workless:
    unit, most, device = "examples", None, torch.device("cpu")

    def step(self, size: int) -> None: ...


def test_an_error_of_ones_own_comes_through() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        prove(target(models.mlp(), loss=broken), size=8)


def test_a_loop_that_steps_is_told_to_leave_the_step_out_and_the_weights_stay() -> None:
    setup = models.mlp()
    made = target(setup)

    def loop(model: nn.Module, parts: Sequence[Any]) -> None:
        accumulate(model, models.classify, parts)
        made.optimizer.step()

    made.accumulate = loop
    before = [parameter.clone() for parameter in setup.model.parameters()]
    with pytest.raises(ConfigError, match=r"the loop changes the weights.*leave the optimizer's step out of it"):
        prove(made, size=8)
    assert all(torch.equal(a, b) for a, b in zip(setup.model.parameters(), before, strict=True))


def test_parts_are_told_with_what_is_left() -> None:
    told: list[tuple[str, float | None]] = []
    setup = models.mlp()
    setup.model.float()
    inputs, classes = setup.make_batch(7)
    prove(
        target(setup, make_batch=lambda size: (inputs.float(), classes)),
        size=7,
        on_part=lambda *part: told.append(part),
    )
    splits = ["split in 2", "split in 3", "split in 7"]
    assert [what for what, _ in told] == ["computes in fp64", "causes looked for", *splits, "in its own dtype"]
    left = [seconds for _, seconds in told]
    assert all(seconds is not None and seconds > 0 for seconds in left[:-1])
    assert left[-1] == 0


def small(loss: Callable[[nn.Module, Any], Tensor], **more: Any) -> Target:
    model = nn.Linear(3, 1)
    optimizer = more.pop("optimizer", None) or torch.optim.SGD(model.parameters())
    return Target(model, optimizer, lambda size: {"x": torch.randn(size, 3), "y": torch.randn(size, 1)}, loss, **more)


def test_a_loss_that_takes_its_labels_out_of_the_batch_is_run_again() -> None:
    proof = prove(small(lambda model, batch: F.mse_loss(model(batch["x"]), batch.pop("y"))), size=4, ranks=(1,))
    assert proof.equal


def test_a_gradient_that_is_not_finite_is_compared_with_nothing() -> None:
    """It was "not the gradient of the whole", with NaN in the JSON."""
    with pytest.raises(RunError, match="not finite in 2 of 2 parameters, first in weight"):
        prove(small(lambda model, batch: model(batch["x"]).mean() * float("nan")), size=4, ranks=(1,))


def test_what_the_optimizer_trains_beside_the_model_would_not_be_seen() -> None:
    scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="trains 1 tensors that aren't parameters of the model"):
        prove(
            small(lambda model, batch: (model(batch["x"]) * scale).mean(), optimizer=torch.optim.SGD([scale])),
            size=4,
            ranks=(1,),
        )
