"""Counts against published ones, and against the real models of transformers, built without memory."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import ConfigError
from stoker.memory import shape_of
from stoker.memory.families import FAMILIES

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
}  # fmt: skip
PUBLISHED: list[tuple[dict[str, Any], int]] = [
    (LLAMA_8B, 8_030_261_248),
    (DEEPSEEK_V3, 671_026_404_352),
    ({
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    }, 7_615_616_512),
    ({
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    }, 30_532_122_624),
    ({
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
    }, 9_241_705_984),
    ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
     124_439_808),
]  # fmt: skip
"""The counts that the models' cards state (their safetensors totals, on huggingface.co)."""


def shuffled(kind: str, seed: int) -> dict[str, Any]:
    """A config with sizes drawn at random, small enough to build in no time on the meta device."""
    draw = random.Random(f"{kind}{seed}")
    keys, groups, size = draw.choice([1, 2, 3]), draw.choice([1, 2, 4]), draw.choice([8, 12])
    heads = keys * groups
    common: dict[str, Any] = {
        "hidden_size": heads * size, "num_attention_heads": heads, "num_key_value_heads": keys,
        "intermediate_size": draw.randint(5, 90), "num_hidden_layers": draw.randint(1, 3),
        "vocab_size": draw.randint(20, 300), "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip
    if kind == "gpt2":
        return {"n_embd": heads * size, "n_head": heads, "n_layer": 2, "n_positions": draw.randint(8, 64),
                "vocab_size": common["vocab_size"], "n_inner": draw.choice([None, 50])}  # fmt: skip
    if kind in ("bert", "roberta"):
        return common | {"max_position_embeddings": draw.randint(8, 64), "type_vocab_size": draw.randint(1, 3)}
    if kind == "qwen2":
        return common
    if kind == "deepseek_v3":
        return common | {
            "num_key_value_heads": heads, "q_lora_rank": draw.choice([None, 10]), "kv_lora_rank": 14,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 4, "n_group": 2,
            "topk_group": 1, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 11,
            "first_k_dense_replace": draw.randint(0, 1),
        }  # fmt: skip
    experts = {"mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 9}}
    biases = {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}
    if kind == "smollm3":
        common["pad_token_id"] = None
    mine = {"llama": biases, "smollm3": biases, "qwen3": {"attention_bias": draw.random() < 0.5}}
    return common | {"head_dim": draw.choice([4, 6])} | experts.get(kind, {}) | mine.get(kind, {})


@pytest.mark.parametrize(("config", "published"), PUBLISHED, ids=lambda case: "")
def test_published_counts(config: dict[str, Any], published: int) -> None:
    assert shape_of(config).parameters == published


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_counts_are_those_of_the_real_model(kind: str) -> None:
    """Every family, two random configs each."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    maker = AutoModelForMaskedLM if kind in ("bert", "roberta") else AutoModelForCausalLM
    for seed in range(2):
        config = AutoConfig.for_model(kind, **shuffled(kind, seed))
        with torch.device("meta"):
            model = maker.from_config(config)
        assert shape_of(config.to_dict()).parameters == model.num_parameters(), config
        # What a saved config leaves out must not change the count.
        written = json.loads(config.to_json_string(use_diff=True))
        assert shape_of(written).parameters == model.num_parameters(), written


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("llama", "LlamaForSequenceClassification"),
        ("llama", "LlamaForTokenClassification"),
        ("llama", "LlamaModel"),
        ("gpt2", "GPT2Model"),
        ("bert", "BertModel"),
        ("bert", "BertForPreTraining"),
        ("bert", "BertForSequenceClassification"),
        ("bert", "BertForTokenClassification"),
        ("bert", "BertForQuestionAnswering"),
    ],
)
def test_other_heads(kind: str, architecture: str) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **shuffled(kind, 0), num_labels=5)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    assert shape_of(config.to_dict(), architecture).parameters == model.num_parameters()


def test_an_unknown_family_is_refused_with_the_way_to_measure_it() -> None:
    with pytest.raises(ConfigError, match=r"'mamba'.*stoker batch memory file.py:make_target"):
        shape_of({"model_type": "mamba"})


def test_a_config_that_lacks_something_names_it() -> None:
    with pytest.raises(ConfigError, match="'llama': vocab_size is missing"):
        shape_of({key: value for key, value in LLAMA_8B.items() if key != "vocab_size"})
    with pytest.raises(ConfigError, match="ForSpeech isn't known"):
        shape_of(LLAMA_8B, "LlamaForSpeech")


def test_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert shape_of(tmp_path) == shape_of(LLAMA_8B) == shape_of(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a config"):
        shape_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        shape_of(tmp_path)
    with pytest.raises(ConfigError, match="not readable"):
        shape_of(tmp_path / "nothing")


def test_key_value_cache() -> None:
    """Bytes of a token in 16 bit, as the models' papers and engines state them."""
    assert 2 * shape_of(LLAMA_8B).cache_elements() == 131_072
    assert 2 * shape_of(PUBLISHED[2][0]).cache_elements() == 57_344
    assert 2 * shape_of(DEEPSEEK_V3).cache_elements() == 70_272
    with pytest.raises(ConfigError, match="encoder"):
        shape_of({**shuffled("bert", 0), "model_type": "bert"}).cache_elements()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft, of transformers
def test_adapters_are_those_of_peft() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **shuffled("llama", 1))
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=3, target_modules="all-linear"))
    assert shape_of(config.to_dict()).adapters(3) == model.get_nb_trainable_parameters()[0]


def test_it_prints_and_goes_to_json() -> None:
    shape = shape_of(LLAMA_8B)
    assert str(shape) == "llama (LlamaForCausalLM): 8,030,261,248 parameters, 32 layers of width 4096"
    assert json.loads(json.dumps(shape.to_json()))["parameters"] == 8_030_261_248
