"""stoker: batch control for any PyTorch training, and RL post-training that knows what it costs."""

from typing import TYPE_CHECKING

from stoker.lazy import lazy

if TYPE_CHECKING:
    from stoker.config.load import from_dict, load
    from stoker.config.schema import RunConfig
    from stoker.runner import Result, train

__all__ = ["Result", "RunConfig", "from_dict", "load", "train"]
__version__ = "0.1.0"

if not TYPE_CHECKING:
    # Planning and reading runs must work, and start fast, without torch.
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "Result": "runner",
            "RunConfig": "config.schema",
            "from_dict": "config.load",
            "load": "config.load",
            "train": "runner",
        },
    )
