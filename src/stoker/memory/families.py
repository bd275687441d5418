"""ModelShape from a Hugging Face config: the families whose parts are known, each held to the real model's counts.

Counts are those of the models of transformers 5.24. An unknown family is refused: its parts would have to be guessed.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.errors import ConfigError
from stoker.memory.classic import bert, gpt2
from stoker.memory.decoders import Config, deepseek_v3, experts, gated
from stoker.memory.shape import ModelShape

__all__ = ["FAMILIES", "shape_of"]


def shape_of(source: Config | Path | str, architecture: str | None = None) -> ModelShape:
    """The shape of a model.

    `source`: a config as a mapping, or a folder (or its `config.json`). `architecture`: the class, where it isn't the
    config's first (`LlamaForCausalLM`; its ending says what stands after the layers). Raises ConfigError where the
    family isn't known, or the config lacks what its family needs.
    """
    config = source if isinstance(source, Mapping) else _read(Path(source))
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        raise ConfigError(
            f"model_type {kind!r} isn't one whose memory stoker knows by formula ({', '.join(sorted(FAMILIES))}): "
            "measure it with `stoker batch memory file.py:make_target`, where make_target() returns a "
            "stoker.batch.Target(model, optimizer, make_batch, loss)"
        )
    named = architecture or next(iter(config.get("architectures") or ()), "")
    try:
        return FAMILIES[kind](config, named)
    except KeyError as error:
        raise ConfigError(f"config of model_type '{kind}': {error.args[0]} is missing") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"config of model_type '{kind}': {error}") from None


def _read(path: Path) -> Config:
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not readable ({error}); give a model's folder or its config.json") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}: not JSON ({error}); give a model's folder or its config.json") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: a {type(data).__name__}, not a config")
    return data


FAMILIES: Mapping[str, Callable[[Config, str], ModelShape]] = {
    "bert": bert,
    "deepseek_v3": deepseek_v3,
    "gemma": gated(norm="gemma", qkv_bias="attention_bias", out_bias="attention_bias", tied=True, head_dim=256),
    "gemma2": gated(
        norm="gemma",
        norms=4,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        tied=True,
        head_dim=256,
        softcap=True,
    ),
    "gemma3_text": gated(
        norm="gemma",
        norms=4,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        tied=True,
        head_dim=256,
        normed=True,
    ),
    "gpt2": gpt2,
    "llama": gated(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": gated(),
    "mixtral": experts(width="intermediate_size"),
    "qwen2": gated(qkv_bias=True),
    "qwen3": gated(qkv_bias="attention_bias", out_bias="attention_bias", normed=True, head_dim=128),
    "qwen3_moe": experts(width="moe_intermediate_size", normed=True, qkv_bias="attention_bias"),
    "roberta": bert,
    "smollm3": gated(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", tied=True),
}
"""Shape by `model_type`."""
