"""The table that lets prompts per step change: what it takes, what it refuses and how it says so."""

import tomllib

import pytest

from stoker.config.load import from_dict, to_toml
from stoker.config.schema import RunConfig
from stoker.errors import ConfigError


def run(*overrides: str, **schedule: object) -> RunConfig:
    return from_dict({"name": "a", "task": {"sources": [{"path": "x"}]}, "schedule": schedule}, overrides)


HELD_OUT = ("validation.holdout=8", "validation.every_samples=64")


def test_each_kind_with_what_it_needs() -> None:
    assert run().schedule.kind == "fixed"
    stages = run(kind="stages", prompts=[32, 8], starts=[10, 20])
    assert stages.schedule.most(16) == 32
    assert run(kind="ramp", last=64, over=100, multiple=8, by="samples").schedule.most(16) == 64
    assert run(*HELD_OUT, kind="plateau", last=8).schedule.most(16) == 16
    assert run(kind="noise", last=64, times=0.5).schedule.most(16) == 64
    for config in (run(), stages):
        assert from_dict(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(
    ("schedule", "overrides", "message"),
    [
        ({"kind": "stages", "starts": [4]}, (), "needs schedule.prompts"),
        ({"kind": "ramp"}, (), "needs schedule.last and schedule.over"),
        ({"kind": "noisy"}, (), "must be 'fixed', 'stages', 'ramp', 'plateau' or 'noise'"),
        ({"last": 64}, (), r"schedule.last does nothing with schedule.kind = 'fixed', which takes no other key"),
        ({"kind": "ramp", "last": 64, "over": 9, "patience": 2}, (), "patience does nothing .*takes last, over, by"),
        ({"kind": "stages", "prompts": [32], "starts": [4, 9]}, (), "prompts has 1 entries, schedule.starts 2"),
        ({"kind": "stages", "prompts": [32, 64], "starts": [9, 9]}, (), "each must be later"),
        ({"kind": "stages", "prompts": [32], "starts": [0]}, (), r"schedule.starts.0 = 0: must be greater than 0"),
        ({"kind": "ramp", "last": 60, "over": 9, "multiple": 8}, (), "multiple = 8 does not divide the 60 prompts"),
        ({"kind": "ramp", "last": 16, "over": 9}, (), "nothing changes"),
        (
            {"kind": "stages", "prompts": [24], "starts": [4]},
            ("update.samples_per_update=128",),
            "128 does not divide the 192 samples of steps of 24 prompts",
        ),
        (
            {"kind": "ramp", "last": 64, "over": 9, "multiple": 8},
            ("update.samples_per_update=128",),
            "128 does not divide the 64 samples of schedule.multiple of 8 prompts",
        ),
        ({"kind": "plateau", "last": 64}, (), "set validation.holdout"),
        ({"kind": "noise", "last": 64}, ("record.noise_every_steps=0",), "set record.noise_every_steps"),
        ({"kind": "noise", "last": 64}, ("update.samples_per_update=64",), "update.samples_per_update = 0"),
        (
            {"kind": "plateau", "last": 64},
            (*HELD_OUT, "optimizer.decay=cosine"),
            "optimizer.decay = 'cosine' ends with",
        ),
        (
            {"kind": "stages", "prompts": [512], "starts": [4]},
            ("kl.adaptive=true", "kl.horizon_samples=300"),
            "too short for steps of 4096 samples",
        ),
    ],
)
def test_what_cannot_be_is_refused(schedule: dict[str, object], overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*overrides, **schedule)
