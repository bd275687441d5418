"""Models and tokenizers from a folder, a Hugging Face name, a GGUF file or stoker itself."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from stoker.config import schema
from stoker.engine.local.dtype import fastest_dtype
from stoker.engine.local.fused import prepare_update
from stoker.engine.local.heap import keep_freed_memory
from stoker.engine.local.locate import base_of, locate, refuse_pickle
from stoker.engine.local.refuse import explained, first_line, require_causal_behaviour, require_causal_kind
from stoker.errors import ModelError

if TYPE_CHECKING:
    from stoker.engine.local.adapters import Adapters

__all__ = [
    "adapters_to_train",
    "cast_weights",
    "count_parameters",
    "count_planned",
    "exact_weights",
    "load_model",
    "load_other",
    "load_tokenizer",
    "pick_device",
]

NOISE = ("dropout", "pdrop", "dropout_prob", "drop_rate", "layerdrop", "jitter_noise")


def load_tokenizer(model: schema.Model) -> Any:
    """The model's tokenizer, with a pad token in any case, and no longer text than the model's context."""
    base = base_of(model.path)
    folder, gguf = locate(base or model.path)
    own = Path(model.path).expanduser()  # adapters may come with a tokenizer
    source = str(own) if base and (own / "tokenizer_config.json").is_file() else folder
    with explained(model.path, "tokenizer"):
        extra = {"gguf_file": gguf} if gguf else {}
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code, **extra)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code, **extra)
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < tokenizer.model_max_length:
        tokenizer.model_max_length = positions  # many tokenizers state no limit
    if tokenizer.pad_token_id is None:
        # Any id would do: stoker masks pads by length, never by id.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def load_model(model: schema.Model, seed: int) -> PreTrainedModel:
    """A causal language model on its device, in its dtype, in eval mode, all dropout off.

    A folder of adapters is loaded on top of the base that it names. Raises ModelError for what can't be found, isn't
    causal, or would need pickle.
    """
    if base := base_of(model.path):
        from stoker.engine.local.lora import attach_saved

        loaded = load_model(model.model_copy(update={"path": base, "from_scratch": False}), seed)
        attach_saved(loaded, Path(model.path).expanduser())
        return loaded
    disable_progress_bar()  # transformers' own bars would tear the display
    if model.threads:
        torch.set_num_threads(model.threads)
    device = pick_device(model.device)
    if device.type == "cpu":
        keep_freed_memory()
    if model.dtype == "auto":
        model = model.model_copy(update={"dtype": fastest_dtype(device)})
    folder, gguf = locate(model.path)
    with explained(model.path, "model"):
        extra = {"gguf_file": gguf} if gguf else {}
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code, **extra)
    require_causal_kind(config, model.path)
    _dropout_off(config)
    if model.from_scratch:
        loaded = _random_weights(config, model, seed)
    else:
        refuse_pickle(folder, model.path)
        loaded = _pretrained_weights(config, model, folder, gguf)
    for module in loaded.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    loaded.to(device=device)  # type: ignore[call-arg]  # its decorator hides self
    loaded.eval()
    require_causal_behaviour(loaded, model.path)
    return loaded


def exact_weights(model: schema.Model, loaded: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """In float32 by name, where `loaded` was rounded to fewer bits than its files keep; else empty.

    Masters that begin at rounded weights sit in the middle of a rounding step: at the rates of RL many updates pass
    before a 16-bit policy moves at all. Exact ones are anywhere within it, so as many cross it as should.
    """
    if loaded.dtype == torch.float32:
        return {}
    folder, gguf = locate(model.path)
    extra = {"gguf_file": gguf} if gguf else {}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code, **extra)
    if not model.from_scratch and getattr(config, "dtype", None) == loaded.dtype:
        return {}
    exact = load_model(model.model_copy(update={"dtype": "float32"}), seed)
    return {name: parameter.detach() for name, parameter in exact.named_parameters()}


def adapters_to_train(model: PreTrainedModel, config: schema.RunConfig, path: str) -> "Adapters | None":
    """The adapters of lora.rank, put into the model or found in it; None: all weights are trained.

    `path` is what the model was loaded from. Raises ModelError where the adapters can't be had.
    """
    settings = config.lora
    if not settings.rank:
        if base_of(path):
            raise ModelError(
                f"{path!r} holds adapters, and lora.rank = 0 trains all weights: set lora.rank, or start from a merged "
                "model (resume the run that made the adapters once with lora.checkpoint = 'merged')"
            )
        return None
    from stoker.engine.local.lora import prepare

    folder, gguf = locate(base_of(path) or path)
    if gguf and settings.checkpoint == "adapter":
        raise ModelError(
            f"model.path = {path!r} is a GGUF file, which peft can't load as the base of adapters: "
            "set lora.checkpoint = 'merged'"
        )
    base = str(Path(folder).resolve()) if Path(folder).is_dir() else folder
    return prepare(model, settings, base, config.seed)


def count_planned(config: schema.RunConfig, path: str) -> tuple[int, int]:
    """(all, trained) parameters of the policy at `path`, from its config alone: no weight is loaded."""
    folder, gguf = locate(base_of(path) or path)
    with explained(path, "model"), torch.device("meta"):
        extra = {"gguf_file": gguf} if gguf else {}
        found = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code, **extra)
        model = AutoModelForCausalLM.from_config(found, trust_remote_code=config.model.trust_remote_code)
    total = count_parameters(model)
    if not config.lora.rank:
        return total, total
    from stoker.engine.local.lora import trained_parameters

    return total, trained_parameters(model, config.lora)


def load_other(config: schema.RunConfig, section: schema.Reference | schema.Critic) -> PreTrainedModel:
    """A second model (reference, critic) under the policy's settings, its weights always loaded."""
    dtype = getattr(section, "dtype", None) or config.model.dtype
    settings = config.model.model_copy(update={"path": section.path, "from_scratch": False, "dtype": dtype})
    try:
        model = load_model(settings, config.seed)
    except ModelError as error:  # it speaks of model.path, which is not the key at fault
        raise ModelError(f"{type(section).__name__.lower()} model: {error}") from error
    prepare_update(model, compiled=config.update.compiled)
    return model


def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same model with weights and saved buffers in `dtype`. `model.to(dtype)` would also round rotary tables."""
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
    return model


def count_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """Distinct parameters (a tied table counts once): all, or those that are not frozen."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad or not trained)


def pick_device(name: str) -> torch.device:
    """`auto`: cuda, then mps, then cpu. Raises ModelError for a device that isn't there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=name).item()  # the meta device has no numbers to give
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error)
        raise ModelError(f"model.device = {name!r} can't be used here ({reason}); use 'auto' or 'cpu'") from error
    return torch.device(name)


# -- building ------------------------------------------------------------------------------------


def _random_weights(config: PretrainedConfig, model: schema.Model, seed: int) -> PreTrainedModel:
    # Drawn on the CPU in fp32, whatever dtype and device come later, so a seed means the same weights everywhere.
    with torch.random.fork_rng(devices=[]), explained(model.path, "model"):
        torch.manual_seed(seed)
        drawn = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=model.attention,
            trust_remote_code=model.trust_remote_code,
        )
    return cast_weights(drawn, getattr(torch, model.dtype))


def _pretrained_weights(
    config: PretrainedConfig, model: schema.Model, folder: str, gguf: str | None
) -> PreTrainedModel:
    source: dict[str, Any] = {"use_safetensors": True}
    if gguf:
        from transformers.utils.quantization_config import GgufConfig

        source = {"gguf_file": gguf, "quantization_config": GgufConfig(dequantize=True)}
    with explained(model.path, "model"):
        answer: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, model.dtype),
            attn_implementation=model.attention,
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
            **source,
        )
    loaded, info = answer
    if missing := sorted(info["missing_keys"]):  # transformers fills them with random numbers
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"model.path = {model.path!r} lacks weights of a causal language model ({missing[0]}{more}): "
            "is it whole, and not a classifier or a bare encoder?"
        )
    return loaded


def _dropout_off(config: PretrainedConfig) -> None:
    """With dropout the policy that is trained isn't the one that sampled: the ratio would not be 1 on-policy."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            _dropout_off(value)
        elif isinstance(value, float) and name.endswith(NOISE):
            setattr(config, name, 0.0)
