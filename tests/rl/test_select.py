import numpy as np
import pytest

from stoker.rl.select import departures, reason_to_leave
from stoker.rl.types import Group, Prompt, Sample, SamplingParams, Scored

PROMPT = Prompt(id="sums:0", token_ids=(1, 2), content="1+1=", answer="2")
EOS = 0


def scored(tokens=(5, EOS), finish="stop", reward=1.0, model_mask=None) -> Scored:
    sample = Sample(
        prompt=PROMPT,
        index=0,
        params=SamplingParams(),
        weight_version=0,
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        text="",
        finish=finish,
        model_mask=None if model_mask is None else np.array(model_mask),
    )
    return Scored(sample, rewards={}, reward=reward)


@pytest.mark.parametrize(
    ("one", "rules", "reason"),
    [
        (scored(), {}, None),
        (scored(finish="length"), {}, None),
        (scored(finish="length"), {"mask_truncated": True}, "truncated"),
        (scored(reward=None), {}, "abstained"),
        (scored(reward=None), {"bootstrap_truncated": True}, "abstained"),
        (scored(reward=None, finish="length"), {"bootstrap_truncated": True}, None),
        (scored(reward=None, finish="length"), {"bootstrap_truncated": True, "mask_truncated": True}, "truncated"),
        (scored(tokens=()), {}, "empty"),
        (scored(model_mask=[False, False]), {}, "empty"),
    ],
)
def test_who_leaves_and_why(one, rules, reason):
    assert reason_to_leave(one, **rules) == reason


@pytest.mark.parametrize("last", [EOS, 7, 8])
def test_peer_fault_09_any_stop_token_completes_an_answer(last):
    assert reason_to_leave(scored(tokens=(5, last), finish="stop"), mask_truncated=True) is None


def test_failure_22_departures_are_counted():
    group = Group(PROMPT, (scored(), scored(tokens=()), scored(reward=None), scored(finish="length"), scored(())))
    assert departures([group], mask_truncated=True) == {"abstained": 1, "truncated": 1, "empty": 2}
