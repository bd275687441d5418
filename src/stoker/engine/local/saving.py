"""Weights and tensors to and from a checkpoint folder: safetensors only, and in place on the way back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.errors import CheckpointError

__all__ = [
    "copy_tensors",
    "load_json",
    "load_policy",
    "load_rng",
    "load_tensors",
    "save_json",
    "save_policy",
    "save_rng",
    "save_tensors",
    "tensors_of",
]


def save_policy(
    model: PreTrainedModel, tokenizer: Any, folder: Path, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """What `AutoModelForCausalLM.from_pretrained(folder)` loads, in the compute dtype, with the tokenizer.

    `tensors` are saved in the place of the model's own state.
    """
    # Views into fused matrices are copied, the rest is written as it lies; tied names must stay one tensor.
    copies: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] = {}
    state = {}
    for name, tensor in (model.state_dict() if tensors is None else tensors).items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if key not in copies:
            whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            copies[key] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
        state[name] = copies[key]
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def load_policy(model: PreTrainedModel, folder: Path) -> None:
    """Copy saved weights into the model's own storage, which a sampler may share. Raises CheckpointError where they
    can't be read or are of another model.
    """
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder} holds adapters, and lora.rank = 0 trains all weights: resume with the saved config.toml, or "
            "start a new run from a merged policy"
        )
    try:
        saved = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"can't read the policy in {folder}: {error}; use an earlier checkpoint") from error
    copy_tensors(tensors_of(saved), tensors_of(model), folder)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters (a tied one once, by the name of its first use) and buffers that belong to the state."""
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    aliases = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return parameters | {name: tensor for name, tensor in module.state_dict().items() if name not in aliases}


@torch.no_grad()
def copy_tensors(tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor], source: Path) -> None:
    """Into the targets' own storage, by name. Raises CheckpointError where they are of another model."""
    for name, target in targets.items():
        if name not in tensors or tensors[name].shape != target.shape:
            raise CheckpointError(f"{source} is of another model: {name} is missing or has another shape")
        target.copy_(tensors[name])


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """One safetensors file; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Raises CheckpointError where the file is missing or damaged."""
    _require(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"can't read {path}: {error}; use an earlier checkpoint") from error


def save_json(data: Mapping[str, Any], path: Path) -> None:
    """One JSON file."""
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def load_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError where the file is missing or damaged."""
    _require(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {path}: {error}; use an earlier checkpoint") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no table; use an earlier checkpoint")
    return data


def _require(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(
            f"can't read {path}, which isn't there: use an earlier checkpoint; or, where the run file asks for more "
            "than the saved one (a critic, adapters, a leash), resume with the saved config.toml, or start a new run "
            "with start_from"
        )


def save_rng(path: Path) -> None:
    """torch's generators; stoker's own draws don't use them, but a model's code may."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    save_tensors(states, path)


def load_rng(path: Path) -> None:
    """Inverse of `save_rng`; states of devices that aren't here are left out."""
    states = load_tensors(path)
    torch.set_rng_state(states["cpu"])
    for name, state in states.items():
        if name.startswith("cuda:") and int(name.removeprefix("cuda:")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, name)
