"""With the real Trainer."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from stoker.batch import fit, prove
from stoker.batch.bridges.shares import Shares
from stoker.batch.bridges.transformers import CertifiedBatch, shares_of, target_of
from stoker.batch.loading import LoaderOptions
from stoker.errors import ConfigError, DataError, RunError


def rows(count: int = 24) -> list[dict[str, list[int]]]:
    """Ragged: 4 to 20 tokens, the labels half of them masked."""
    rng = random.Random(0)
    lengths = [rng.randint(4, 20) for _ in range(count)]
    made = []
    for n in lengths:
        ids = [rng.randint(0, 255) for _ in range(n)]
        made.append({"input_ids": ids, "attention_mask": [1] * n, "labels": [-100] * (n // 2) + ids[n // 2 :]})
    return made


class Means(nn.Module):
    """A model that takes no num_items_in_batch: its loss is the mean of the batch it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(258, 8), nn.Linear(8, 258))

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
        return {"loss": nn.functional.cross_entropy(self.inner(input_ids).flatten(0, 1), labels.flatten())}


def trainer(
    folder: Path, tokenizer: PreTrainedTokenizerFast, model: nn.Module | None = None, **arguments: Any
) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=257, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    given: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "max_steps": 3, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "logging_steps": 1, "learning_rate": 1e-2,
        "dataloader_pin_memory": False, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return Trainer(
        model if model is not None else LlamaForCausalLM(config),
        TrainingArguments(**given | arguments),
        train_dataset=rows(),  # type: ignore[arg-type]
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )


def weights(of: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in of.model.parameters()])


def test_a_target_steps_on_the_longest_examples_and_is_trained_by_them(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    target = target_of(trainer(tmp_path, tiny_tokenizer))
    assert (target.most, target.unit, target.device) == (24, "examples", torch.device("cpu"))
    lengths = sorted((len(row["input_ids"]) for row in rows()), reverse=True)
    assert target.make_batch(5)["input_ids"].shape == (5, lengths[0])
    assert target.make_batch(5)["attention_mask"].sum(1).tolist() == lengths[:5]
    before = target.loss(target.model, target.make_batch(24)).item()
    for _ in range(5):
        target.step(24)
    assert target.loss(target.model, target.make_batch(24)).item() < before
    with pytest.raises(DataError, match="25 examples is larger than the data set, which has 24"):
        target.make_batch(25)


def test_a_size_below_an_update_is_tried_with_gradients_held(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    target = target_of(trainer(tmp_path, tiny_tokenizer))  # 8 examples an update
    made: list[int] = []
    make = target.make_batch
    target.make_batch = lambda size: (made.append(size), make(size))[1]
    for size in (4, 8, 12):
        target.step(size)
    assert made == [4, 4, 8, 12]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # the name that all versions know
def test_checkpointing_and_clipping_of_the_arguments_are_in_the_trial(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    of = trainer(tmp_path, tiny_tokenizer, gradient_checkpointing=True, max_grad_norm=1e-3)
    target = target_of(of)
    assert of.model.is_gradient_checkpointing
    target.step(8)
    assert torch.stack([p.grad.norm() for p in of.model.parameters()]).norm() <= 1.01e-3


def test_making_a_target_leaves_the_trainer_to_train_as_if_it_had_not_been(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    plain, looked_at = (trainer(tmp_path / name, tiny_tokenizer) for name in "ab")
    target_of(looked_at)
    plain.train()
    looked_at.train()
    assert torch.equal(weights(plain), weights(looked_at))
    assert looked_at.state.global_step == 3


def test_a_fit_in_this_process_leaves_the_trainer_as_it_was(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    plain, fitted = (trainer(tmp_path / name, tiny_tokenizer) for name in "ab")
    found = fit(target_of(fitted), in_process=True, limit_bytes=2**31, most=12)
    assert (found.size, found.bound, found.steps >= 2) == (12, "data", True)
    fitted.add_callback(CertifiedBatch(fitted, found, say=None))
    plain.train()
    fitted.train()
    assert torch.equal(weights(plain), weights(fitted))


def test_a_proof_holds_the_trainers_own_accumulation_against_the_whole(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A model that takes no num_items_in_batch averages micro-batches of unequal labels alike."""
    found = prove(target_of(trainer(tmp_path, tiny_tokenizer, Means())), size=6, splits=[2], ranks=(1,))
    assert not found.equal
    assert [cause.kind for cause in found.causes] == ["per-microbatch mean"]


def test_the_certified_size_trains_the_same_update(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    plain, certified = (trainer(tmp_path / name, tiny_tokenizer) for name in "ab")
    said: list[str] = []
    callback = CertifiedBatch(certified, 3, say=said.append)
    certified.add_callback(callback)
    assert callback.applied.after == Shares(2, 4, 1) == shares_of(certified)
    plain.train()
    certified.train()
    assert certified.state.global_step == 3
    torch.testing.assert_close(weights(certified), weights(plain), rtol=1e-4, atol=1e-5)
    assert said[0].startswith(
        "stoker: 8 per micro-batch x 1 accumulated -> 2 per micro-batch x 4 accumulated; "
        "8 examples an update, as before; 3 per micro-batch fit"
    )
    rates = [row["learning_rate"] for row in certified.state.log_history if "learning_rate" in row]
    assert rates == [row["learning_rate"] for row in plain.state.log_history if "learning_rate" in row]


def test_a_larger_certified_size_takes_accumulation_away(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    of = trainer(tmp_path, tiny_tokenizer, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert CertifiedBatch(of, 100, say=None).applied.after == Shares(8, 1, 1)


def test_peer_fault_25_a_resume_keeps_the_certified_size(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """The checkpoint was written at 8 a micro-batch; the resume runs, and saves, 4."""
    whole = trainer(tmp_path / "whole", tiny_tokenizer, max_steps=4)
    whole.train()
    first = trainer(tmp_path / "run", tiny_tokenizer, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    seen: list[int] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(kwargs["train_dataloader"].total_batch_size)

    resumed = trainer(tmp_path / "run", tiny_tokenizer, max_steps=4, save_strategy="steps", save_steps=4)
    resumed.add_callback(CertifiedBatch(resumed, 4, say=None))
    resumed.add_callback(Watch())
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert (seen, resumed.state.train_batch_size, resumed.state.global_step) == ([4], 4, 4)
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=1e-4, atol=1e-5)


def test_peer_fault_25_a_size_that_something_else_changes_is_an_error(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    of = trainer(tmp_path, tiny_tokenizer)
    of.add_callback(CertifiedBatch(of, 4, say=None))
    of.args.gradient_accumulation_steps = 1
    with pytest.raises(RunError, match="something changed them since"):
        of.train()
    own = trainer(tmp_path, tiny_tokenizer)
    own.get_train_dataloader = lambda: torch.utils.data.DataLoader(rows(), 8, collate_fn=own.data_collator)  # type: ignore[method-assign,arg-type]
    own.add_callback(CertifiedBatch(own, 4, say=None))
    with pytest.raises(RunError, match="the loader gives 8 examples a micro-batch, not the 4"):
        own.train()


def test_peer_fault_25_a_back_off_at_run_time_is_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    of = trainer(tmp_path, tiny_tokenizer, auto_find_batch_size=True)
    for refused in (lambda: target_of(of), lambda: CertifiedBatch(of, 4)):
        with pytest.raises(ConfigError, match="auto_find_batch_size"):
            refused()


def test_the_notes_say_what_accumulation_changes(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = Means()
    model.norm = nn.BatchNorm1d(4)
    of = trainer(tmp_path, tiny_tokenizer, model)
    notes = " ".join(CertifiedBatch(of, 4, say=None).applied.notes)
    assert "learning rate and schedule are unchanged" in notes
    assert "BatchNorm" in notes
    assert "takes no num_items_in_batch" in notes
    whole = trainer(tmp_path, tiny_tokenizer, Means())
    assert len(CertifiedBatch(whole, 8, say=None).applied.notes) == 1


def test_a_collator_that_makes_labels_works(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    of = trainer(tmp_path, tiny_tokenizer)
    of.data_collator = DataCollatorForLanguageModeling(tiny_tokenizer, mlm=False)
    of.train_dataset = [{"input_ids": row["input_ids"]} for row in rows()]  # type: ignore[assignment]
    target = target_of(of)
    target.step(4)
    assert target.load is not None
    batches = list(target.load(8, LoaderOptions()))
    assert [type(batch) for batch in batches] == [dict, dict, dict]
    target.step_on(batches[0])
