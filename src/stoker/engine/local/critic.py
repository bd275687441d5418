"""PPO's value model: a trunk of its own, started from the policy, and a linear head."""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.config.schema import RunConfig
from stoker.engine.checkpoint import policy_folder
from stoker.engine.local.forward import hidden_states, sharing_width, trunk_of
from stoker.engine.local.layout import Microbatch
from stoker.engine.local.load import load_other
from stoker.engine.local.saving import copy_tensors, load_tensors, tensors_of
from stoker.errors import ModelError

__all__ = ["Critic", "follows_policy", "start_critic"]


class Critic(nn.Module):
    """Values of the states before each token. Shares no weight with the policy: its budget and rate are its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        trunk = trunk_of(model)
        if trunk is None:
            raise ModelError(
                f"{type(model).__name__} has no trunk apart from its head, so no critic can start from it; use "
                "algorithm.name = 'grpo', or give another model as critic.path"
            )
        self.trunk = copy.deepcopy(trunk).requires_grad_(True)
        self.sharing_width = sharing_width(model)
        width = model.config.get_text_config().hidden_size
        # fp32 and zero: the first advantages are the returns themselves, not noise of a random head.
        self.head = nn.Linear(width, 1, dtype=torch.float32, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Microbatch) -> Tensor:
        """(N,) value of the state before each scored token."""
        values: Tensor = self.head(hidden_states(self.trunk, batch).float())[:, 0]
        return values

    @torch.no_grad()
    def restart_from(self, model: PreTrainedModel) -> None:
        """Take the trunk weights of the model as they are now; zero the head."""
        source = trunk_of(model)
        assert source is not None
        self.trunk.load_state_dict(source.state_dict())
        self.head.weight.zero_()
        self.head.bias.zero_()


def start_critic(config: RunConfig, policy: PreTrainedModel) -> Critic:
    """From critic.path or else the policy; the saved critic of start_from, where there is one, replaces its weights."""
    critic = Critic(load_other(config, config.critic) if config.critic.path else policy).eval()
    if (saved := _saved_critic(config)) is not None:
        copy_tensors(load_tensors(saved), tensors_of(critic), saved)
    return critic


def follows_policy(config: RunConfig) -> bool:
    """True where the critic starts as the policy does, so that it must start again after a warm start."""
    return not config.critic.path and _saved_critic(config) is None


def _saved_critic(config: RunConfig) -> Path | None:
    if not config.start_from:
        return None
    policy = policy_folder(Path(config.start_from))
    path = policy.parent / "critic.safetensors"
    return path if policy.name == "policy" and path.is_file() else None
