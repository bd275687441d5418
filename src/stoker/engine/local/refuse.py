"""Models that can't be loaded or aren't causal, in words: what is wrong, with which path, and the way out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from stoker.batch.out_of_memory import is_out_of_memory
from stoker.errors import ModelError, StokerError

__all__ = ["explained", "first_line", "require_causal_behaviour", "require_causal_kind"]


@contextmanager
def explained(path: str, what: str) -> Iterator[None]:
    """Turn what transformers raises while loading into a ModelError that names the path and a fix."""
    try:
        yield
    except ImportError as error:
        fix = "pip install gguf" if "gguf" in str(error).lower() else "install the package it names"
        raise ModelError(
            f"the {what} at {path!r} needs a package that isn't installed: {fix} ({first_line(error)})"
        ) from error
    except StokerError:
        raise
    except Exception as error:  # a damaged file makes its reader raise anything, struct.error included
        if is_out_of_memory(error):
            raise
        message = str(error)
        if "trust_remote_code" in message:
            fix = "it runs code of its own: read that code, then set model.trust_remote_code = true"
        elif "does not recognize this architecture" in message or "Unrecognized model" in message:
            fix = "this transformers release doesn't know its architecture: upgrade transformers, or use another model"
        elif "does not support an attention implementation" in message:
            fix = "set model.attention = 'eager'"
        else:
            fix = "give a folder written by save_pretrained, a GGUF file, or a Hugging Face name that is in the cache"
        raise ModelError(f"can't load the {what} at {path!r}: {fix} ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """Of its message, or its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def require_causal_kind(config: PretrainedConfig, path: str) -> None:
    """Raise ModelError for an encoder-decoder."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"model.path = {path!r} is {config.model_type}, an encoder-decoder; stoker trains decoder-only models"
        )


@torch.no_grad()
def require_causal_behaviour(model: PreTrainedModel, path: str) -> None:
    """Raise ModelError where a later token moves an earlier position's logits (BERT-like models load as language models
    too), or where there are no finite logits.
    """
    ids = torch.arange(8, device=model.device).remainder(model.config.get_text_config().vocab_size)[None]
    other = ids.clone()
    other[0, -1] = 0
    try:
        first, second = (model(input_ids=one, use_cache=False).logits[0, :-1] for one in (ids, other))
    except (RuntimeError, IndexError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"model.path = {path!r} fails on {len(ids[0])} tokens ({first_line(error)}): its config.json makes no "
            f"working {type(model).__name__}"
        ) from error
    if not torch.isfinite(second).all():
        raise ModelError(
            f"model.path = {path!r} gives logits that are not finite: its weights are damaged, or model.dtype = "
            f"{str(model.dtype).removeprefix('torch.')!r} is too narrow for them"
        )
    if not torch.allclose(first.float(), second.float(), rtol=1e-2, atol=1e-2):
        raise ModelError(
            f"model.path = {path!r} ({model.config.model_type}) looks at later tokens, so it can't be sampled left to "
            "right; use a causal (decoder-only) language model"
        )
