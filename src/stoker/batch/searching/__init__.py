"""Bayesian search over the batch and the learning rate at equal samples (Optuna), pruned, resumable from its file."""

from typing import TYPE_CHECKING

from stoker.lazy import lazy

if TYPE_CHECKING:
    from stoker.batch.searching.running import search
    from stoker.batch.searching.searched import Searched, Trial
    from stoker.batch.searching.space import Space, powers_of_two

__all__ = ["Searched", "Space", "Trial", "powers_of_two", "search"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "Searched": "searched",
            "Space": "space",
            "Trial": "searched",
            "powers_of_two": "space",
            "search": "running",
        },
    )
