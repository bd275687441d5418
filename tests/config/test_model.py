"""What in a run file doesn't go with adapters is said before anything loads."""

import pytest

from stoker.config.load import from_dict
from stoker.errors import ConfigError

BASE = {"name": "a", "task": {"sources": [{"path": "x"}]}, "rewards": [{"function": "math"}], "lora": {"rank": 4}}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.name=ppo"], "critic is a second whole model"),
        (["model.from_scratch=true"], r"set lora\.checkpoint = 'merged'"),
        (["reference.dtype=bfloat16"], r"reference\.dtype = 'bfloat16': with adapters"),
        (["lora.alpha=0"], r"lora\.alpha"),
        (["lora.dropout=0.1"], r"lora\.dropout"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_dict(BASE, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.from_scratch=true", "lora.checkpoint=merged"],
        ["model.from_scratch=true", "start_from=runs/a"],
        ["reference.dtype=bfloat16", "reference.path=other"],
        ["reference.dtype=float32"],
        ["lora.rank=0", "algorithm.name=ppo", "model.from_scratch=true"],
        ["lora.target_modules=['q_proj']"],
    ],
)
def test_the_rest_goes(overrides: list[str]) -> None:
    assert from_dict(BASE, overrides)
