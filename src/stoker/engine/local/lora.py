"""Puts low-rank adapters into a model: fresh ones to train, or saved ones. Refuses by name what can't carry them.

Imported only where adapters are asked for: peft is an optional package, and slow to import.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stoker.config import schema
from stoker.errors import ModelError

try:
    from peft import LoraConfig, PeftConfig, inject_adapter_in_model, set_peft_model_state_dict
    from peft.tuners.lora import Linear as AdaptedLinear

    from stoker.engine.local.adapters import ADAPTER, Adapters, layers_of
    from stoker.engine.local.lora_linear import LeanLinear
except ImportError as error:
    raise ModelError(f"LoRA adapters need peft, which isn't there ({error}): pip install 'stoker[lora]'") from error

__all__ = ["attach_saved", "prepare", "trained_parameters"]

_PROBE_TOKENS = 32
_MAPS = (nn.Linear, Conv1D)
"""These alone, not what derives from them: `LeanLinear` computes W x + b without calling the map."""


def prepare(model: PreTrainedModel, settings: schema.Lora, base: str, seed: int) -> Adapters:
    """Adapters ready to train in a model that has none, or saved ones; everything else is frozen.

    `base` is where the model was loaded from, for whoever loads the adapters later. Raises ModelError where saved
    adapters are others than `settings` asks for, and for maps that an adapter would not act on.
    """
    if layers_of(model):
        _require_same(model, settings)
    else:
        targets = _targets(model, settings)
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides it by the rank; any number will do
            target_modules=targets,
            lora_dropout=0.0,
            fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in targets),
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        with torch.random.fork_rng(devices=[]):  # A is drawn on the CPU in fp32: a seed means the same A everywhere
            torch.manual_seed(seed)
            _inject(model, config)
        adapted = layers_of(model).keys() & set(targets)
        if lost := {_leaf(name) for name in targets if name not in adapted}:
            raise ModelError(
                f"peft takes {', '.join(sorted(lost))} of {type(model).__name__} for its experts' joint tensors, which "
                f"stoker gives no adapters: {_hint(adapted)}"
            )
        _make_lean(model)
    adapters = Adapters(model, settings)
    model.requires_grad_(False)
    for parameter in adapters.parameters.values():
        parameter.requires_grad_(True)
    _require_effect(model)
    return adapters


def attach_saved(model: PreTrainedModel, folder: Path) -> None:
    """Put the adapters of a folder (peft's files) into their base. Raises ModelError where they don't fit."""
    config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise ModelError(
            f"{folder} holds {config.peft_type} adapters; stoker knows LoRA: merge them where they come from"
        )
    config.lora_dropout = 0.0  # as all dropout of a model
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise ModelError(f"{folder} has no {path.name} (pickled adapters can run code, and are never loaded)")
    _inject(model, config)
    _require_plain(model, config, folder)
    try:
        result: Any = set_peft_model_state_dict(model, load_file(path))
    except (RuntimeError, SafetensorError) as error:
        raise ModelError(f"{path} doesn't fit {type(model).__name__}: {str(error).splitlines()[0]}") from error
    missing = [name for name in result.missing_keys if ".lora_" in name]
    _make_lean(model)
    if strange := [*missing, *result.unexpected_keys]:
        raise ModelError(f"{path} doesn't fit {type(model).__name__}: {strange[0]} (and {len(strange) - 1} more)")


def _make_lean(model: PreTrainedModel) -> None:
    for layer in layers_of(model).values():
        layer.__class__ = LeanLinear


def trained_parameters(model: PreTrainedModel, settings: schema.Lora) -> int:
    """How many parameters the adapters of `settings` would have, without making them."""
    shapes = [model.get_parameter(f"{name}.weight").shape for name in _targets(model, settings)]
    return sum(settings.rank * (rows + columns) for rows, columns in shapes)


def _targets(model: PreTrainedModel, settings: schema.Lora) -> list[str]:
    """Names of the linear maps that `settings` means, adapted or not."""
    maps = _linear_maps(model)
    if not maps:
        raise ModelError(
            f"{type(model).__name__} has no linear maps but its head that adapters can go on (torch's Linear, "
            "transformers' Conv1D): set lora.rank = 0"
        )
    wanted = settings.target_modules
    for suffix in wanted:
        if not any(_ends_with(name, suffix) for name in maps):
            raise ModelError(f"lora.target_modules: {type(model).__name__} has no {suffix!r}; {_hint(maps)}")
    return [name for name in maps if not wanted or any(_ends_with(name, suffix) for suffix in wanted)]


def _linear_maps(model: PreTrainedModel) -> list[str]:
    """All but the head: it is often the table of embeddings too, and scores are made without calling it."""
    head = model.get_output_embeddings()
    adapted = layers_of(model)
    inside = tuple(f"{name}." for name in adapted)  # base, A and B of an adapted map
    plain = [n for n, m in model.named_modules() if type(m) in _MAPS and m is not head]
    return [*adapted, *(name for name in plain if not name.startswith(inside))]


def _ends_with(name: str, suffix: str) -> bool:
    return f".{name}".endswith(f".{suffix}")


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _hint(names: Iterable[str]) -> str:
    return f"set lora.target_modules to some of {sorted({_leaf(name) for name in names})}"


def _inject(model: PreTrainedModel, config: LoraConfig) -> None:
    """In the model's dtype: with 16 bits the optimizer has the fp32 master, as for any weight."""
    maps = _linear_maps(model)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set")  # peft finds it out for each map
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern")  # what it makes of experts
            inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        raise ModelError(f"peft refuses {type(model).__name__}: {error} ({_hint(maps)})") from error
    for layer in layers_of(model).values():
        for part in (layer.lora_A, layer.lora_B):
            part[ADAPTER].to(model.dtype)


def _require_plain(model: PreTrainedModel, config: LoraConfig, folder: Path) -> None:
    """What trains, merges and saves adapters knows A and B of linear maps, nothing else."""
    if config.modules_to_save or config.trainable_token_indices:
        raise ModelError(f"{folder} has whole modules or tokens beside its adapters: merge it with peft, and load that")
    for name, layer in layers_of(model).items():
        plain = type(layer) is AdaptedLinear and type(layer.get_base_layer()) in _MAPS
        if not plain or layer.lora_variant or layer.lora_bias[ADAPTER]:
            raise ModelError(
                f"{folder} has more than plain LoRA on linear maps at {name} (DoRA, a bias, embeddings, experts' "
                "tensors): merge it into its base with peft, and load that"
            )


def _require_same(model: PreTrainedModel, settings: schema.Lora) -> None:
    """A run goes on from saved adapters as they are; to re-shape them silently would be another run."""
    layers = layers_of(model)
    ranks = {layer.r[ADAPTER] for layer in layers.values()}
    scales = {layer.scaling[ADAPTER] for layer in layers.values()}
    targets = set(_targets(model, settings))
    if ranks == {settings.rank} and scales == {settings.alpha / settings.rank} and targets == layers.keys():
        return
    rank, alpha = max(ranks), max(scales) * max(ranks)
    raise ModelError(
        f"the saved adapters have rank {rank}, alpha {alpha:g} and targets {sorted({_leaf(name) for name in layers})}: "
        f"go on with lora.rank = {rank}, lora.alpha = {alpha:g} and those lora.target_modules (a change needs a "
        "merged checkpoint: resume that run once with lora.checkpoint = 'merged')"
    )


def _require_effect(model: PreTrainedModel) -> None:
    """Some models read a map's weight without calling the map: an adapter there would be trained and never act.

    Asked by a gradient, which reaches every B that acts, even a zero one. Maps are judged by the last part of their
    name: of many experts a few tokens don't reach each.
    """
    layers = layers_of(model)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    parts = [layer.lora_B[ADAPTER].weight for layer in layers.values()]
    gradients = torch.autograd.grad(logits.log_softmax(-1)[..., 0].sum(), parts, allow_unused=True)
    acts = {_leaf(name): False for name in layers}
    for name, gradient in zip(layers, gradients, strict=True):
        acts[_leaf(name)] |= gradient is not None and bool(gradient.any())
    if idle := sorted(name for name, does in acts.items() if not does):
        raise ModelError(
            f"{type(model).__name__} uses the weights of {', '.join(idle)} without calling them, so adapters there "
            f"would do nothing: {_hint(name for name in layers if acts[_leaf(name)])}"
        )
