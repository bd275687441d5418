"""stoker: batch control for any PyTorch training, and RL post-training that knows what it costs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.config.load import from_dict, load
    from stoker.config.schema import RunConfig
    from stoker.runner import Result, train

__all__ = ["Result", "RunConfig", "from_dict", "load", "train"]
__version__ = "0.1.0"

_HOMES = {
    "Result": "stoker.runner",
    "RunConfig": "stoker.config.schema",
    "from_dict": "stoker.config.load",
    "load": "stoker.config.load",
    "train": "stoker.runner",
}


def __getattr__(name: str) -> Any:
    # Lazy: planning and reading runs must work, and start fast, without torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
