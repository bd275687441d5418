"""A data set whose examples are their own places."""

import torch


class Places(torch.utils.data.Dataset[int]):
    def __init__(self, examples: int = 53) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, place: int) -> int:
        return place
