"""Secrets are refused in run files and hidden wherever text is kept."""

import pytest

from stoker.config.load import from_dict
from stoker.config.secrets import is_secret_name, redact, redact_argv
from stoker.errors import ConfigError

HUB = "hf_" + "aBcD" * 8
OPENAI = "sk-proj-" + "a1B2c3D4" * 3


@pytest.mark.parametrize(
    ("kwargs", "path"),
    [
        ({"api_key": "anything"}, "rewards.0.kwargs.api_key"),
        ({"judge": {"hf-token": "x"}}, "rewards.0.kwargs.judge.hf-token"),
        ({"headers": ["a", f"Bearer {OPENAI}"]}, "rewards.0.kwargs.headers.1"),
        ({"note": HUB}, "rewards.0.kwargs.note"),
        ({"url": "https://user:pass@host/x"}, "rewards.0.kwargs.url"),
    ],
)
def test_failure_42_secret_in_config_is_refused_without_being_shown(kwargs: dict[str, object], path: str) -> None:
    data = {
        "name": "a",
        "task": {"sources": [{"path": "x"}]},
        "rewards": [{"function": "judge.py:score", "kwargs": kwargs}],
    }
    with pytest.raises(ConfigError, match=r"take it from the environment") as caught:
        from_dict(data)
    assert f"{path}: looks like a secret" in str(caught.value)
    assert HUB not in str(caught.value)
    assert OPENAI not in str(caught.value)


def test_failure_42_secret_in_an_override_is_refused_without_being_shown() -> None:
    data = {"name": "a", "task": {"sources": [{"path": "x"}]}}
    for override in (f"rewards.0.kwargs.key={HUB}", f"hub_token={OPENAI}", f"bad path.api_key={HUB}", f"seed={HUB}"):
        with pytest.raises(ConfigError) as caught:
            from_dict(data, [override])
        assert HUB not in str(caught.value)
        assert OPENAI not in str(caught.value)


def test_ordinary_values_are_no_secrets() -> None:
    config = from_dict(
        {
            "name": "a",
            "task": {
                "sources": [
                    {"path": "hf_datasets/sk-learn-digits-of-a-kind", "kwargs": {"eos_token": "</s>", "max_tokens": 5}}
                ]
            },
            "algorithm": {"loss_weighting": "token"},
        }
    )
    assert config.task.sources[0].kwargs["eos_token"] == "</s>"


@pytest.mark.parametrize("name", ["HF_TOKEN", "api-key", "WANDB_API_KEY", "dbPassword", "client_secret", "a.b.token"])
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["max_new_tokens", "pad_token", "tokenizer", "key", "secretary"])
def test_innocent_names(name: str) -> None:
    assert not is_secret_name(name)


def test_failure_42_redact_hides_values_by_look_by_name_and_from_the_environment() -> None:
    environment = {"WANDB_API_KEY": "0123456789abcdef", "HOME": "/home/someone", "TOKEN": "short"}
    text = f"GET https://u:p4ss@host/ with 0123456789abcdef, password='open sesame', {HUB}; max_new_tokens=64 short"
    shown = redact(text, environment)
    assert shown == "GET https://***@host/ with ***, password=***, ***; max_new_tokens=64 short"


def test_failure_42_redact_argv_hides_the_value_after_its_option() -> None:
    argv = ["stoker", "train", "--api-key", "abc", "--token=xyz", "rewards.0.kwargs.password=open", "seed=3", OPENAI]
    assert redact_argv(argv, {}) == [
        "stoker",
        "train",
        "--api-key",
        "***",
        "--token=***",
        "rewards.0.kwargs.password=***",
        "seed=3",
        "***",
    ]
    assert redact_argv([], {}) == []
