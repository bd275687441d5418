"""Losses that no training could differentiate."""

from typing import Any

import pytest
import torch

from stoker.batch.scalar import scalar
from stoker.errors import ConfigError


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "gives None (is a `return` missing?)"),
        (0.5, "gives a float (no .item() in a loss)"),
        ({"loss": torch.ones(()), "logits": None}, "gives a dict of 'loss', 'logits'"),
        ((torch.ones(()), None), "gives a tuple of 2"),
        (torch.ones(2, 3, requires_grad=True), "gives [2, 3] numbers"),
        (torch.ones(()), "gives a loss without a gradient: no parameter that is trained"),
    ],
)
def test_each_is_named_with_what_to_return(found: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scalar(found)
    assert words in str(caught.value)


def test_one_number_of_any_shape_is_a_loss() -> None:
    for shape in ((), (1,), (1, 1)):
        loss = torch.ones(shape, requires_grad=True)
        assert scalar(loss) is loss
