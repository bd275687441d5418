"""Adapters: which models carry them, what they change, and that nothing else moves, to the last bit."""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from stoker.config.schema import Model
from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.load import adapters_to_train, cast_weights, load_model, load_tokenizer
from stoker.engine.local.sampler import LocalSampler
from stoker.errors import CheckpointError, ModelError
from stoker.rl.types import Objective, Prompt, Request, SamplingParams, TrainBatch, TrainRow

Make = Callable[..., Any]
POLICY = Objective("policy")
LORA = {"rank": 4, "alpha": 8.0}

SIZE = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None,
    "initializer_range": 0.4,
}  # fmt: skip
GROUPED = SIZE | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
CARRIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "gpt2": GPT2Config(**SIZE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "gemma3": Gemma3TextConfig(**(GROUPED | {"initializer_range": 0.1}), head_dim=8),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**EXPERTS, head_dim=8, num_experts=4),
}  # fmt: skip


def build(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()


@pytest.fixture
def make_lora_learner(make_learner: Make) -> Make:
    """A learner that trains adapters; the model is taken to come from `path`."""

    def make(model: PreTrainedModel, path: str | Path = "base", **tables: Any) -> LocalLearner:
        return make_learner(model, path=str(path), **({"lora": LORA} | tables))

    return make


def train(learner: LocalLearner, make_rows: Make, updates: range) -> None:
    for update in updates:
        learner.forward_backward(TrainBatch(tuple(make_rows(seed=update))), POLICY)
        assert learner.step(update + 1)["optim/skipped"] == 0


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Everything but A and B, under the names that it has without adapters."""
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    return {name.replace(".base_layer.", "."): tensor.clone() for name, tensor in state.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def with_reference(learner: LocalLearner, rows: list[TrainRow]) -> list[TrainRow]:
    return [replace(r, reference_logprobs=q) for r, q in zip(rows, learner.score(rows, "reference"), strict=True)]


def first_kl(learner: LocalLearner, rows: list[TrainRow]) -> tuple[float, float]:
    batch = TrainBatch(tuple(with_reference(learner, rows)))
    metrics = learner.forward_backward(batch, replace(POLICY, kl_coefficient=0.1))
    return metrics["kl/mean"], metrics["kl/loss"]


# -- what changes, and what doesn't ----------------------------------------------------------------


@pytest.mark.parametrize("name", CARRIES)
def test_the_base_never_changes_and_is_the_reference_bit_for_bit(
    name: str, make_learner: Make, make_lora_learner: Make, make_rows: Make
) -> None:
    model, rows = build(CARRIES[name]), make_rows()
    before, plain = weights_of(model), make_learner(copy.deepcopy(model)).score(rows, "policy")
    learner = make_lora_learner(model, kl={"coefficient": 0.1})
    learner.begin_rl()
    assert first_kl(learner, rows) == (0.0, 0.0), "exactly: adapters that add nothing are no adapters"
    learner.step(1)
    train(learner, make_rows, range(2))
    assert same(weights_of(model), before)
    found, moved = learner.score(rows, "reference"), learner.score(rows, "policy")
    assert all((a == b).all() for a, b in zip(found, plain, strict=True))
    assert max(np.abs(a - b).max() for a, b in zip(moved, plain, strict=True)) > 1e-3


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("activation_gib", [None, 0.0])
def test_gradients_equal_autograd_through_explicit_matrices(
    name: str, make_lora_learner: Make, make_rows: Make, gradients: Make, activation_gib: float | None
) -> None:
    """The reference has no peft in it: W + s B A is put in the place of W by hand."""
    plain, rows = build(CARRIES[name]), make_rows()
    learner = make_lora_learner(copy.deepcopy(plain), update={"activation_gib": activation_gib})
    parameters = learner._adapters.parameters
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters.values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    learner.forward_backward(TrainBatch(tuple(rows)), POLICY)

    leaves = {key: p.detach().clone().requires_grad_(True) for key, p in parameters.items()}
    replaced = {}
    for key in leaves:
        if ".lora_A." in key:
            delta = 2.0 * leaves[key.replace("lora_A", "lora_B")] @ leaves[key]
            target = key.replace(".lora_A.default", "")
            weight = plain.get_parameter(target).detach()
            replaced[target] = weight + (delta.t() if name == "gpt2" else delta)
    total = torch.zeros(())
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.token_ids.tolist()]])
        logits = torch.func.functional_call(plain, replaced, (), {"input_ids": ids}).logits[0]
        logprobs = logits[len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(row.token_ids).long()[:, None])[:, 0]
        total = total - (torch.from_numpy(row.weights * row.advantages) * chosen).sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(leaves.values()))])
    found = gradients(learner)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_frozen_weights_have_no_gradient_and_no_optimizer_state(
    make_lora_learner: Make, make_rows: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(CARRIES["tied"])
    learner = make_lora_learner(model)
    products = []
    original = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: products.append((a.shape, b.shape)) or original(a, b))
    train(learner, make_rows, range(1))
    assert not [shapes for shapes in products if 258 in shapes[0]], "the head's weight gradient was made"
    state = learner._optimizers["policy"].tensors()
    assert state
    assert all(".lora_" in name for name in state)
    assert all(p.grad is None for p in model.parameters())
    learner.forward_backward(TrainBatch(tuple(make_rows())), POLICY)
    graded = {name for name, p in model.named_parameters() if p.grad is not None}
    assert graded == learner._adapters.parameters.keys()
    assert len(graded) == 2 * 14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampler_draws_from_the_adapted_policy(
    make_lora_learner: Make, make_rows: Make, tiny_tokenizer: object, dtype: torch.dtype
) -> None:
    model = build(CARRIES["llama"])
    with torch.no_grad():  # at its own scale fp32 rounds this model's log-probs by more than the bound
        model.get_output_embeddings().weight.mul_(0.25)
    model = cast_weights(model, dtype)
    learner = make_lora_learner(model)
    train(learner, make_rows, range(3))
    sampler = LocalSampler(model, tiny_tokenizer, concurrent_samples=64)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.8, max_new_tokens=12)
    prompts = [Prompt(f"p:{n}", tuple(range(n, 2 * n + 3)), "", None) for n in range(1, 5)]
    sampler.submit([Request(prompt, index, params, seed=3) for prompt in prompts for index in range(4)])
    samples = list(sampler.collect())
    empty = [np.zeros(len(s.token_ids), np.float32) for s in samples]
    rows = [
        TrainRow(
            s.id, s.prompt.token_ids, s.token_ids, e == 0, e, e, s.logprobs, temperature=s.params.temperature
        )
        for s, e in zip(samples, empty, strict=True)
    ]  # fmt: skip
    ratios = [np.exp(a - b.sampler_logprobs) for a, b in zip(learner.score(rows, "policy"), rows, strict=True)]
    assert max(np.abs(ratio - 1).max() for ratio in ratios) < (1e-5 if dtype == torch.float32 else 0.2)
    with learner._adapters.off():
        base = learner.score(rows, "policy")
    assert max(np.abs(a - b.sampler_logprobs).max() for a, b in zip(base, rows, strict=True)) > 0.05


def test_bfloat16_adapters_have_an_fp32_master(make_lora_learner: Make, make_rows: Make) -> None:
    """A step far below bf16's spacing moves the master, and the compute weights once they add up."""
    model = cast_weights(build(CARRIES["llama"]), torch.bfloat16)
    learner = make_lora_learner(model, optimizer={"learning_rate": 1e-3, "warmup_fraction": 0.0})
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    train(learner, make_rows, range(2))
    masters = {key: t for key, t in learner._optimizers["policy"].tensors().items() if key.startswith("master/")}
    assert {t.dtype for t in masters.values()} == {torch.float32}
    assert masters.keys() == {f"master/{name}" for name in learner._adapters.parameters}
    assert all(torch.equal(masters[f"master/{n}"].bfloat16(), p) for n, p in learner._adapters.parameters.items())


# -- the reference ---------------------------------------------------------------------------------


def test_peer_fault_19_after_a_warm_start_the_reference_is_the_warmed_policy_not_the_base(
    make_lora_learner: Make, make_rows: Make, tmp_path: Path
) -> None:
    model, rows = build(CARRIES["llama"]), make_rows()
    learner = make_lora_learner(model, kl={"coefficient": 0.1})
    with learner._adapters.off():
        base = learner.score(rows, "policy")
    for _ in range(3):
        learner.forward_backward(TrainBatch(tuple(rows)), Objective("sft"))
        learner.step(0)
    warmed = learner.score(rows, "policy")
    learner.begin_rl()
    assert first_kl(learner, rows) == (0.0, 0.0)
    learner.step(1)
    learner.save_reference(tmp_path / "reference")
    train(learner, make_rows, range(3))
    found = learner.score(rows, "reference")
    assert all((a == b).all() for a, b in zip(found, warmed, strict=True))
    assert max(np.abs(a - b).max() for a, b in zip(found, base, strict=True)) > 0.05, "the base is another"
    after = learner.score(rows, "policy")
    assert max(np.abs(a - b).max() for a, b in zip(found, after, strict=True)) > 1e-3, "the policy came back"

    resumed = make_lora_learner(build(CARRIES["llama"]), kl={"coefficient": 0.1})
    resumed.load_reference(tmp_path / "reference")
    assert all((a == b).all() for a, b in zip(resumed.score(rows, "reference"), warmed, strict=True))


def test_peer_fault_19_from_saved_adapters_the_reference_is_base_and_adapters_together(
    make_lora_learner: Make, make_rows: Make, tmp_path: Path
) -> None:
    base, rows = saved_base(tmp_path), make_rows()
    first = make_lora_learner(load(base), base)
    train(first, make_rows, range(3))
    first.save(tmp_path / "step_1")
    start = tmp_path / "step_1" / "policy"
    learner = make_lora_learner(load(start), start, kl={"coefficient": 0.1})
    learner.begin_rl()
    assert first_kl(learner, rows) == (0.0, 0.0)
    pairs = zip(learner.score(rows, "reference"), first.score(rows, "policy"), strict=True)
    assert all((a == b).all() for a, b in pairs)


def test_fresh_adapters_keep_no_copy_and_say_so_in_the_saved_reference(
    make_lora_learner: Make, make_rows: Make, tmp_path: Path
) -> None:
    learner = make_lora_learner(build(CARRIES["llama"]), kl={"coefficient": 0.1})
    learner.begin_rl()
    assert learner._reference.tensors() == {}
    learner.save_reference(tmp_path)
    train(learner, make_rows, range(1))
    learner.load_reference(tmp_path)
    assert learner._reference.tensors() == {}, "not the adapters as they are by now"
    (tmp_path / "reference.safetensors").unlink()
    with pytest.raises(CheckpointError, match="can't read"):
        learner.load_reference(tmp_path)


# -- saving ----------------------------------------------------------------------------------------


def saved_base(folder: Path, config: PreTrainedConfig | None = None, dtype: torch.dtype = torch.float32) -> Path:
    cast_weights(build(config or CARRIES["llama"]), dtype).save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "src" / "stoker" / "embedded" / "tiny").save_pretrained(
        folder / "base"
    )
    return folder / "base"


def load(path: Path, dtype: str = "float32") -> PreTrainedModel:
    return load_model(Model(path=str(path), dtype=dtype, device="cpu"), seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpoint", ["adapter", "merged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_resume_is_bit_exact(
    make_lora_learner: Make, make_rows: Make, tmp_path: Path, optimizer: str, dtype: torch.dtype, checkpoint: str
) -> None:
    tables = {
        "lora": LORA | {"checkpoint": checkpoint},
        "optimizer": {"name": optimizer, "learning_rate": 1e-2, "warmup_fraction": 0.0, "weight_decay": 0.1},
    }
    start = cast_weights(build(CARRIES["llama"]), dtype)
    straight = make_lora_learner(copy.deepcopy(start), **tables)
    train(straight, make_rows, range(4))
    broken = make_lora_learner(copy.deepcopy(start), **tables)
    train(broken, make_rows, range(2))
    trained = {name: tensor.clone() for name, tensor in broken._adapters.tensors().items()}
    broken.save(tmp_path)
    assert same(broken._adapters.tensors(), trained), "a save, merged or not, leaves the trained state alone"
    assert same(weights_of(broken._model), weights_of(start))

    resumed = make_lora_learner(copy.deepcopy(start), **tables)
    resumed.load(tmp_path)
    assert same(resumed._adapters.tensors(), trained)
    train(resumed, make_rows, range(2, 4))
    assert same(resumed._adapters.tensors(), straight._adapters.tensors())
    assert same(resumed._optimizers["policy"].tensors(), straight._optimizers["policy"].tensors())


@pytest.mark.parametrize("name", CARRIES)
def test_merged_policy_loads_with_transformers_alone_and_answers_as_the_adapted_one(
    name: str, make_lora_learner: Make, make_rows: Make, tmp_path: Path
) -> None:
    learner = make_lora_learner(build(CARRIES[name]), lora=LORA | {"checkpoint": "merged"})
    train(learner, make_rows, range(3))
    learner.save(tmp_path)
    assert not (tmp_path / "policy" / "adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected, found = (m(input_ids=ids).logits.log_softmax(-1) for m in (learner._model, merged))
        with learner._adapters.off():
            base = learner._model(input_ids=ids).logits.log_softmax(-1)
    assert float((found - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))
    assert float((base - expected).abs().max()) > 1e-2
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").eos_token == "<eos>"


def test_a_16_bit_merge_is_rounded_once(make_lora_learner: Make, make_rows: Make, tmp_path: Path) -> None:
    learner = make_lora_learner(
        cast_weights(build(CARRIES["llama"]), torch.bfloat16), lora=LORA | {"checkpoint": "merged"}
    )
    train(learner, make_rows, range(2))
    learner.save(tmp_path)
    name, saved = "model.layers.0.mlp.up_proj", load_file(tmp_path / "policy" / "model.safetensors")
    a, b = (learner._adapters.parameters[f"{name}.lora_{part}.default.weight"].double() for part in "AB")
    exact = learner._model.get_submodule(name).base_layer.weight.double() + 2.0 * b @ a
    assert torch.equal(saved[f"{name}.weight"], exact.float().bfloat16())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft, of transformers
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_adapter_policy_loads_with_peft_with_transformers_and_here(
    name: str, make_lora_learner: Make, make_rows: Make, tmp_path: Path
) -> None:
    base = saved_base(tmp_path, CARRIES[name])
    learner = make_lora_learner(load(base), base)
    train(learner, make_rows, range(3))
    learner.save(tmp_path / "step_3")
    policy = tmp_path / "step_3" / "policy"
    assert json.loads((policy / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert (policy / "adapter_model.safetensors").stat().st_size < (base / "model.safetensors").stat().st_size
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = learner._model(input_ids=ids).logits
        for how in (AutoPeftModelForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
            found = how(str(policy))(input_ids=ids).logits  # peft's own forward adds in another order
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(load(policy)(input_ids=ids).logits, expected)
    assert load_tokenizer(Model(path=str(policy))).eos_token is not None


def test_a_run_goes_on_from_saved_adapters_as_they_were(
    make_lora_learner: Make, make_rows: Make, tmp_path: Path
) -> None:
    base = saved_base(tmp_path)
    learner = make_lora_learner(load(base), base)
    train(learner, make_rows, range(2))
    learner.save(tmp_path / "step_2")
    start = tmp_path / "step_2" / "policy"
    following = make_lora_learner(load(start), start)
    assert same(following._adapters.tensors(), learner._adapters.tensors())
    following.save(tmp_path / "next")
    found = json.loads((tmp_path / "next" / "policy" / "adapter_config.json").read_text())
    assert found["base_model_name_or_path"] == str(base)
    for tables, said in (
        ({"rank": 8, "alpha": 8.0}, r"rank 4, alpha 8 .*lora\.rank = 4"),
        ({"rank": 4, "alpha": 16.0}, "alpha 8"),
        (LORA | {"target_modules": ("q_proj",)}, "targets .*'down_proj'"),
    ):
        with pytest.raises(ModelError, match=said):
            make_lora_learner(load(start), start, lora=tables)
    with pytest.raises(ModelError, match=r"lora\.rank = 0 trains all weights"):
        make_lora_learner(load(start), start, lora={"rank": 0})


def test_adapters_are_refused_on_another_base(make_lora_learner: Make, make_rows: Make, tmp_path: Path) -> None:
    learner = make_lora_learner(build(CARRIES["llama"]))
    train(learner, make_rows, range(1))
    learner.save(tmp_path)
    other = build(CARRIES["llama"])
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    for base in (other, cast_weights(build(CARRIES["llama"]), torch.bfloat16)):
        with pytest.raises(CheckpointError, match="adapters of another base"):
            make_lora_learner(base).load(tmp_path)
    with pytest.raises(CheckpointError, match=r"lora\.target_modules"):
        make_lora_learner(build(CARRIES["llama"]), lora=LORA | {"target_modules": ("q_proj",)}).load(tmp_path)
    with pytest.raises(CheckpointError, match=r"was lora\.rank"):
        make_lora_learner(build(CARRIES["llama"]), lora=LORA | {"rank": 2}).load(tmp_path)


def test_a_resume_with_or_without_adapters_says_what_changed(make_lora_learner: Make, tmp_path: Path) -> None:
    make_lora_learner(build(CARRIES["llama"])).save(tmp_path / "adapters")
    make_lora_learner(build(CARRIES["llama"]), lora={"rank": 0}).save(tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"holds adapters, and lora\.rank = 0"):
        make_lora_learner(build(CARRIES["llama"]), lora={"rank": 0}).load(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match=r"asks for more than the saved one"):
        make_lora_learner(build(CARRIES["llama"])).load(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["lost weights", "pickled", "lost base", "other shape", "stranger"])
def test_damaged_adapter_folders_say_what_is_wrong(make_lora_learner: Make, tmp_path: Path, damage: str) -> None:
    base = saved_base(tmp_path)
    make_lora_learner(load(base), base).save(tmp_path / "step_1")
    policy = tmp_path / "step_1" / "policy"
    weights, settings = policy / "adapter_model.safetensors", policy / "adapter_config.json"
    tensors = load_file(weights)
    first = next(iter(tensors))
    if damage == "lost weights":
        save_file({name: t for name, t in tensors.items() if name != first}, weights)
    elif damage == "other shape":
        save_file(tensors | {first: torch.zeros(2, 2)}, weights)
    elif damage == "stranger":
        save_file(tensors | {first.replace("layers.0", "layers.7"): tensors[first].clone()}, weights)
    elif damage == "pickled":
        weights.rename(policy / "adapter_model.bin")
    else:
        text = settings.read_text().replace(str(base), str(tmp_path / "gone"))
        settings.write_text(text)
    said = {"pickled": "never loaded", "lost base": "bring it back"}.get(damage, "doesn't fit LlamaForCausalLM")
    with pytest.raises(ModelError, match=said):
        load(policy)


# -- refusals --------------------------------------------------------------------------------------


def adapt(model: PreTrainedModel, run_config: Make, **lora: Any) -> Any:
    return adapters_to_train(model, run_config(lora=LORA | lora), "base")


def test_a_map_whose_weight_is_read_without_a_call_is_refused_by_name(run_config: Make) -> None:
    config = JambaConfig(
        **GROUPED, use_mamba_kernels=False, num_experts=2, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1
    )
    with pytest.raises(ModelError, match=r"JambaForCausalLM uses the weights of dt_proj without calling .*'q_proj'"):
        adapt(build(config), run_config)
    assert adapt(build(config), run_config, target_modules=("q_proj", "v_proj")).parameters


def test_what_peft_refuses_is_refused_by_name_with_what_is_left(run_config: Make) -> None:
    config = MambaConfig(**SIZE, state_size=8)
    with pytest.raises(ModelError, match=r"peft refuses MambaForCausalLM: .*out_proj.*'in_proj'"):
        adapt(build(config), run_config)
    assert adapt(build(config), run_config, target_modules=("in_proj", "x_proj")).parameters


def test_maps_that_peft_takes_for_experts_are_refused_by_name(run_config: Make) -> None:
    """Dense first layers beside experts: the names of their maps are those of older experts' matrices."""
    config = DeepseekV3Config(
        **(EXPERTS | {"num_key_value_heads": 4}), n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6,
    )  # fmt: skip
    with pytest.raises(
        ModelError, match=r"peft takes down_proj, gate_proj, up_proj of Deepseek.*\['kv_a_proj"
    ) as error:
        adapt(build(config), run_config)
    named = str(error.value).split("some of ")[1]
    assert "gate_proj" not in named
    assert adapt(build(config), run_config, target_modules=("q_a_proj", "q_b_proj", "o_proj")).parameters


def test_a_model_without_plain_linear_maps_is_refused(run_config: Make) -> None:
    config = FalconConfig(vocab_size=258, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ModelError, match=r"FalconForCausalLM has no linear maps .*: set lora\.rank = 0"):
        adapt(build(config), run_config)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "nothing"])
def test_head_embeddings_and_unknown_maps_are_refused(run_config: Make, target: str) -> None:
    with pytest.raises(ModelError, match=rf"no '{target}'; set lora.target_modules to some of \['down_proj'"):
        adapt(build(CARRIES["llama"]), run_config, target_modules=("q_proj", target))


def test_targets_are_last_parts_of_names(run_config: Make) -> None:
    found = adapt(build(CARRIES["llama"]), run_config, target_modules=("q_proj", "layers.1.mlp.up_proj")).parameters
    assert {name.split(".lora_")[0] for name in found} == {
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj",
    }  # fmt: skip


def test_a_seed_means_the_same_adapters_whatever_the_dtype(run_config: Make) -> None:
    def drawn(seed: int, dtype: torch.dtype) -> Tensor:
        state = torch.get_rng_state()
        model = cast_weights(build(CARRIES["llama"]), dtype)
        adapters = adapters_to_train(model, run_config(lora=LORA, seed=seed), "base")
        assert torch.equal(torch.get_rng_state(), state), "the run's own generator is left alone"
        return torch.cat([tensor.flatten() for tensor in adapters.tensors().values()])

    assert torch.equal(drawn(0, torch.float32).bfloat16(), drawn(0, torch.bfloat16))
    assert not torch.equal(drawn(0, torch.float32), drawn(1, torch.float32))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"use_dora": True}, "more than plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "whole modules or tokens"),
        ({"peft_type": "LOHA"}, "stoker knows LoRA"),
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, make_lora_learner: Make, more: dict[str, Any], said: str) -> None:
    base = saved_base(tmp_path)
    make_lora_learner(load(base), base).save(tmp_path / "step_1")
    settings = tmp_path / "step_1" / "policy" / "adapter_config.json"
    saved = json.loads(settings.read_text())
    kept = {"base_model_name_or_path": saved["base_model_name_or_path"]} if "peft_type" in more else saved
    settings.write_text(json.dumps(kept | more))
    with pytest.raises(ModelError, match=said):
        load(settings.parent)


def test_without_peft_the_error_names_the_package(run_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stoker.engine.local.lora")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'stoker\[lora\]'"):
        adapt(build(CARRIES["llama"]), run_config)
