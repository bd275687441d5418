"""Tiny models and a tiny tokenizer: random weights, built in milliseconds, no files and no network."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from stoker.engine.local.compiler import load_library


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 0-255), then `<eos>` 256 and `<pad>` 257; has a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={piece: place for place, piece in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


@pytest.fixture(scope="session", autouse=True)
def hangups_arrive() -> None:
    """Under nohup they are ignored, by all that tests start too, and stoker respects that."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def compiled_before() -> None:
    """The decoder's functions are there, so that no test's notes say that they were compiled just now."""
    load_library()
    load_library.cache_clear()


@pytest.fixture
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def tiny_llama(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Two layers, width 32, the tokenizer's 258 tokens, fp32; new for each test, always the same weights."""
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.5,  # far from uniform, so that wrong log-probs show
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()
