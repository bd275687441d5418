"""Saving: what is written loads anywhere, and 2 + 2 updates over a save equal 4, bit for bit."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.load import cast_weights
from stoker.errors import CheckpointError, ModelError
from stoker.rl.types import Objective, TrainBatch, TrainRow

Make = Callable[..., Any]


def train(learner: LocalLearner, make_rows: Make, updates: range) -> None:
    for update in updates:
        learner.forward_backward(TrainBatch(tuple(make_rows(seed=update))), Objective("policy", value_clip=0.2))
        learner.step(update + 1)


def weights(model: PreTrainedModel) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_exact(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, tmp_path: Path,
    dtype: torch.dtype, optimizer: str, algorithm: str,
) -> None:  # fmt: skip
    start = cast_weights(tiny_llama, dtype)
    settings = {
        "optimizer": {"name": optimizer, "learning_rate": 1e-2, "warmup_fraction": 0.01, "weight_decay": 0.1},
        "critic": {"optimizer": {"name": optimizer, "learning_rate": 1e-2}},
        "algorithm": {"name": algorithm},
    }
    straight = make_learner(copy.deepcopy(start), **settings)
    train(straight, make_rows, range(4))
    broken = make_learner(copy.deepcopy(start), **settings)
    train(broken, make_rows, range(2))
    broken.save(tmp_path)

    resumed = make_learner(copy.deepcopy(start), **settings)
    resumed.load(tmp_path)
    train(resumed, make_rows, range(2, 4))
    assert not torch.equal(weights(start)[0], weights(straight._model)[0])
    pairs = [(straight._model, resumed._model)]
    if algorithm == "ppo":
        pairs.append((straight._critic, resumed._critic))
    for one, other in pairs:
        assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
    mine, theirs = (learner._optimizers["policy"].tensors() for learner in (straight, resumed))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert straight._guards["policy"].past == resumed._guards["policy"].past


@pytest.mark.parametrize("tied", [False, True])
def test_saved_policy_loads_with_plain_transformers(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, tmp_path: Path, tied: bool
) -> None:
    if tied:
        tiny_llama.config.tie_word_embeddings = True
        tiny_llama.tie_weights()
    learner = make_learner(cast_weights(tiny_llama, torch.bfloat16))
    train(learner, make_rows, range(1))
    learner.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert loaded.dtype == torch.bfloat16
    ids = torch.arange(5)[None]
    assert torch.equal(loaded(input_ids=ids).logits, tiny_llama(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").eos_token == "<eos>"
    assert loaded.generation_config.eos_token_id == 256
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not [name for name in names if not name.endswith((".safetensors", ".json", ".jinja"))], "pickle or strangers"


def test_views_into_fused_storage_are_saved_and_loaded_in_place(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, tmp_path: Path
) -> None:
    """A sampler may own q, k, v as one matrix whose slices the parameters are: the storage must stay theirs."""
    attention = tiny_llama.model.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    fused = torch.cat([part.detach() for part in parts])
    start = 0
    for part in parts:
        part.data = fused[start : start + part.shape[0]]
        start += part.shape[0]
    learner = make_learner(tiny_llama)
    train(learner, make_rows, range(1))
    learner.save(tmp_path)
    after = fused.clone()
    train(learner, make_rows, range(1, 2))
    assert not torch.equal(after, fused)
    learner.load(tmp_path)
    assert torch.equal(after, fused)


def test_reference_outlives_a_resume(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, tmp_path: Path
) -> None:
    learner = make_learner(copy.deepcopy(tiny_llama), kl={"coefficient": 0.1}, reference={"dtype": "bfloat16"})
    learner.begin_rl()
    expected = learner.score(make_rows(), "reference")
    learner.save_reference(tmp_path / "reference")
    moved = make_learner(copy.deepcopy(tiny_llama), kl={"coefficient": 0.1}, reference={"dtype": "bfloat16"})
    with torch.no_grad():
        moved._model.lm_head.weight.add_(1.0)
    moved.load_reference(tmp_path / "reference")
    found = moved.score(make_rows(), "reference")
    assert all((a == b).all() for a, b in zip(expected, found, strict=True))
    assert moved._reference.model.dtype == torch.bfloat16


@pytest.mark.parametrize("victim", ["policy/model.safetensors", "policy_optimizer.safetensors", "learner.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_failure_29_corrupt_checkpoint(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, tmp_path: Path, victim: str, damage: str
) -> None:
    learner = make_learner(tiny_llama)
    train(learner, make_rows, range(1))
    learner.save(tmp_path)
    path = tmp_path / victim
    if damage == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match="earlier checkpoint"):
        learner.load(tmp_path)


def test_checkpoint_of_another_dtype_or_model_is_refused(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, tmp_path: Path
) -> None:
    wide = make_learner(copy.deepcopy(tiny_llama))
    train(wide, make_rows, range(1))
    wide.save(tmp_path)
    narrow = make_learner(cast_weights(copy.deepcopy(tiny_llama), torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"model\.dtype"):
        narrow.load(tmp_path)


def test_reference_and_critic_from_other_models(
    tiny_llama: PreTrainedModel, make_learner: Make, make_rows: Make, tmp_path: Path
) -> None:
    """reference.path, critic.path and the critic of start_from win over the policy, also after a warm start."""
    rows = make_rows()
    teacher = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        teacher.model.embed_tokens.weight.mul_(1.5)
    expected = make_learner(copy.deepcopy(teacher)).score(rows, "policy")
    teacher.save_pretrained(tmp_path / "teacher")
    ppo = {"algorithm": {"name": "ppo"}, "kl": {"coefficient": 0.1}, "model": {"device": "cpu"}}
    ppo |= {"update": {"compiled": False}}  # as the policy here
    path = {"path": str(tmp_path / "teacher")}
    learner = make_learner(copy.deepcopy(tiny_llama), reference=path, critic=path, **ppo)
    learner.begin_rl()
    assert all((a == b).all() for a, b in zip(learner.score(rows, "reference"), expected, strict=True))
    assert torch.equal(learner._critic.trunk.embed_tokens.weight, teacher.model.embed_tokens.weight)
    learner.save_reference(tmp_path / "reference")
    assert not (tmp_path / "reference").exists(), "a named reference needs no saving"

    train(learner, lambda seed: with_reference(learner, make_rows(seed=seed)), range(2))
    learner.save(tmp_path / "checkpoint")
    following = make_learner(copy.deepcopy(tiny_llama), start_from=str(tmp_path / "checkpoint"), **ppo)
    following.begin_rl()
    values = zip(learner.score(rows, "critic"), following.score(rows, "critic"), strict=True)
    assert all((a == b).all() and a.any() for a, b in values)


def with_reference(learner: LocalLearner, rows: list[TrainRow]) -> list[TrainRow]:
    return [replace(r, reference_logprobs=q) for r, q in zip(rows, learner.score(rows, "reference"), strict=True)]


def test_reference_of_another_vocabulary_is_refused(
    tiny_llama: PreTrainedModel, make_learner: Make, tmp_path: Path
) -> None:
    other = copy.deepcopy(tiny_llama)
    other.resize_token_embeddings(300)
    other.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="another vocabulary"):
        make_learner(tiny_llama, reference={"path": str(tmp_path)}, kl={"coefficient": 0.1}, model={"device": "cpu"})
