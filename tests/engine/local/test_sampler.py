"""The local sampler as the loop uses it: what is drawn, how it ends, what never depends on batching."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stoker.engine.local.dense_decoder import DenseDecoder
from stoker.engine.local.drawing import longest_first, next_wave
from stoker.engine.local.sampler import LocalSampler
from stoker.errors import ModelError, RunError
from stoker.rl.types import Prompt, Request, Sample, SamplingParams

Tokenizer = PreTrainedTokenizerFast
TEXTS = ("What is 2 + 2?", "Hi", "Name a colour, any colour.", "Hi", "1, 2, 3,")


def prompts(tokenizer: Tokenizer, texts: Sequence[str] = TEXTS) -> list[Prompt]:
    return [
        Prompt(id=f"test:{row}", token_ids=tuple(tokenizer.encode(text)), content=text, answer=None)
        for row, text in enumerate(texts)
    ]


def requests(tokenizer: Tokenizer, params: SamplingParams, samples: int = 3, seed: int = 0) -> list[Request]:
    return [Request(p, index, params, seed) for p in prompts(tokenizer) for index in range(samples)]


def draw(
    model: PreTrainedModel, tokenizer: Tokenizer, wanted: Sequence[Request], concurrent_samples: int = 64
) -> dict[str, Sample]:
    sampler = LocalSampler(model, tokenizer, concurrent_samples=concurrent_samples)
    sampler.submit(wanted)
    return {sample.id: sample for sample in sampler.collect()}


def force(model: PreTrainedModel, token_ids: Sequence[int]) -> None:
    """Make the model write these tokens, then the last one for ever, whatever the prompt."""
    position = 0

    def write(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        nonlocal position
        logits = torch.full_like(output, -50.0)
        logits[..., token_ids[min(position, len(token_ids) - 1)]] = 50.0
        position += 1
        return logits

    model.lm_head.register_forward_hook(write)


def plain_logits(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.token_ids.tolist()]])
    with torch.no_grad():
        return model(input_ids=ids).logits[0, len(sample.prompt.token_ids) - 1 : -1].float()


def test_draws_do_not_depend_on_batching(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    wanted = requests(tiny_tokenizer, SamplingParams(max_new_tokens=20))
    one, *others = (draw(tiny_llama, tiny_tokenizer, wanted, n) for n in (64, 2, 7))
    for other in (*others, draw(tiny_llama, tiny_tokenizer, wanted[::-1])):
        assert other.keys() == one.keys()
        for sample_id, sample in one.items():
            np.testing.assert_array_equal(other[sample_id].token_ids, sample.token_ids)
            np.testing.assert_allclose(other[sample_id].logprobs, sample.logprobs, atol=1e-4)


def test_same_text_under_two_ids_and_two_visits_are_different_draws(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer
) -> None:
    first = draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, SamplingParams(max_new_tokens=20)))
    second = draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, SamplingParams(max_new_tokens=20), seed=1))
    assert first["test:1/0"].prompt.token_ids == first["test:3/0"].prompt.token_ids
    answers = [tuple(s[i].token_ids) for s in (first, second) for i in ("test:1/0", "test:1/1", "test:3/0")]
    assert len(set(answers)) == len(answers)


def test_each_prompt_of_a_wave_is_computed_once(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    shapes: list[tuple[int, ...]] = []
    tiny_llama.model.embed_tokens.register_forward_hook(lambda _m, inputs, _o: shapes.append(tuple(inputs[0].shape)))
    draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, SamplingParams(max_new_tokens=2)))
    distinct, longest = len(set(TEXTS)), max(map(len, TEXTS))
    assert shapes == [(distinct, longest + 1), (3 * len(TEXTS), 1)]  # and one column of padding, on CPU


def test_waves_are_whole_groups_by_counts_alone(tiny_tokenizer: Tokenizer) -> None:
    queue = requests(tiny_tokenizer, SamplingParams())  # five groups of three
    assert next_wave(queue, 7, equal_lengths=False) == [0, 1, 2, 3, 4, 5]
    assert next_wave(queue, 2, equal_lengths=False) == [0, 1], "a group larger than the limit is split"
    assert next_wave(queue[3:], 64, equal_lengths=True) == [0, 1, 2, 6, 7, 8], "both prompts of length 2"
    queue[1] = replace(queue[1], params=SamplingParams(temperature=0))
    assert next_wave(queue, 6, equal_lengths=False) == [0, 1, 2, 3, 4, 5], "each row has its own parameters"


def test_greedy_is_generate(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    found = draw(
        tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, SamplingParams(temperature=0, max_new_tokens=16), 1)
    )
    for sample in found.values():
        ids = torch.tensor([sample.prompt.token_ids])
        expected = tiny_llama.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        assert sample.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()
        logprobs = plain_logits(tiny_llama, sample).log_softmax(-1)
        np.testing.assert_allclose(sample.logprobs, logprobs.amax(-1), atol=1e-4)
        assert sample.kept is None


def test_peer_fault_07_logprobs_are_of_the_truncated_tempered_distribution(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer
) -> None:
    params = SamplingParams(temperature=0.6, top_p=0.9, top_k=40, max_new_tokens=16)
    for sample in draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, params)).values():
        logits = plain_logits(tiny_llama, sample) / 0.6
        assert sample.kept is not None and len(sample.kept.offsets) == len(sample.token_ids) + 1
        for t, token in enumerate(sample.token_ids):
            kept = sample.kept.ids[sample.kept.offsets[t] : sample.kept.offsets[t + 1]]
            assert token in kept and 1 <= len(kept) <= 40
            probabilities = logits[t].topk(40).values.softmax(-1)
            assert probabilities[: len(kept)].sum() >= 0.9 - 1e-4
            assert probabilities[: len(kept) - 1].sum() < 0.9 + 1e-4
            expected = logits[t, torch.from_numpy(kept).long()].log_softmax(-1)[(kept == token).nonzero()[0]]
            assert sample.logprobs[t] == pytest.approx(expected.item(), abs=1e-4)


def test_peer_fault_08_eos_is_kept_though_pad_is_eos(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    eos = tiny_tokenizer.eos_token_id
    tiny_llama.config.pad_token_id = tiny_llama.generation_config.pad_token_id = eos
    hi = tiny_tokenizer.encode("Hi")
    force(tiny_llama, [*hi, eos])
    for sample in draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, SamplingParams(max_new_tokens=9))).values():
        assert sample.token_ids.tolist() == [*hi, eos]
        assert len(sample.logprobs) == 3
        assert (sample.text, sample.finish) == ("Hi", "stop")


@pytest.mark.parametrize("place", ["generation config", "second in the generation config", "tokenizer", "chat"])
def test_peer_fault_09_any_stop_token_is_a_complete_finish(
    place: str, tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer
) -> None:
    stop = tiny_tokenizer.encode("\n")[0]
    eos: int | list[int] = tiny_tokenizer.eos_token_id
    if place == "generation config":
        eos = stop
    elif place == "second in the generation config":
        eos = [tiny_tokenizer.eos_token_id, stop]
    elif place == "tokenizer":
        eos, stop = stop, tiny_tokenizer.eos_token_id
    else:
        tiny_tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
        tiny_llama.resize_token_embeddings(len(tiny_tokenizer))
        stop = tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")
    tiny_llama.generation_config.eos_token_id = eos
    force(tiny_llama, [*tiny_tokenizer.encode("Hi"), stop])
    params = SamplingParams(max_new_tokens=3)  # the stop token is the last one allowed: still complete
    for sample in draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, params)).values():
        assert (sample.text, sample.finish, sample.token_ids[-1]) == ("Hi", "stop", stop)


def test_length_finish(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    force(tiny_llama, tiny_tokenizer.encode("Hi"))
    params = SamplingParams(max_new_tokens=4)
    for sample in draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, params)).values():
        assert (sample.text, sample.finish, len(sample.token_ids)) == ("Hiii", "length", 4)
        assert sample.truncated


def test_stop_string_across_tokens(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    force(tiny_llama, tiny_tokenizer.encode("é is 4. END of it"))
    params = SamplingParams(max_new_tokens=40, stop=("never", " END"))
    for sample in draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, params)).values():
        assert (sample.text, sample.finish) == ("é is 4.", "stop")
        assert sample.token_ids.tolist() == tiny_tokenizer.encode("é is 4. END")


def test_stop_string_that_is_a_special_token(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    pad = tiny_tokenizer.pad_token_id
    force(tiny_llama, [*tiny_tokenizer.encode("Hi"), pad])
    params = SamplingParams(max_new_tokens=9, stop=("<pad>",))
    for sample in draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, params)).values():
        assert (sample.text, sample.finish, sample.token_ids[-1]) == ("Hi", "stop", pad)


def test_failure_22_empty_completion(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    force(tiny_llama, [tiny_tokenizer.eos_token_id])
    for sample in draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, SamplingParams())).values():
        assert (sample.text, sample.finish) == ("", "stop")
        assert sample.token_ids.tolist() == [tiny_tokenizer.eos_token_id]


def test_failure_32_no_stop_token_needs_a_stop_string(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    tiny_llama.generation_config.eos_token_id = None
    tiny_tokenizer.eos_token = None
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=4)
    with pytest.raises(ModelError, match="names an end-of-sequence token.*set sampling.stop"):
        sampler.submit(requests(tiny_tokenizer, SamplingParams()))
    sampler.submit(requests(tiny_tokenizer, SamplingParams(max_new_tokens=2, stop=("\n",))))
    assert len(list(sampler.collect())) == 3 * len(TEXTS)


def test_peer_fault_18_no_stale_prefix_after_push(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    wanted = requests(tiny_tokenizer, SamplingParams(max_new_tokens=12))
    warm = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=8)
    warm.submit(wanted)
    before = {sample.id: sample for sample in warm.collect()}
    with torch.no_grad():
        for parameter in tiny_llama.parameters():
            parameter.mul_(1.1)
    warm.push(1)
    warm.submit(wanted)
    after = {sample.id: sample for sample in warm.collect()}
    cold = draw(tiny_llama, tiny_tokenizer, wanted, 8)
    for sample_id, sample in after.items():
        np.testing.assert_array_equal(sample.token_ids, cold[sample_id].token_ids)
        np.testing.assert_array_equal(sample.logprobs, cold[sample_id].logprobs)
    assert {s.weight_version for s in before.values()} == {0} and {s.weight_version for s in after.values()} == {1}
    assert any(not np.array_equal(after[i].token_ids, before[i].token_ids) for i in after)


def fail_above(model: PreTrainedModel, rows: int, error: Callable[[], BaseException]) -> None:
    def check(_module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if len(inputs[0]) > rows:
            raise error()

    model.model.embed_tokens.register_forward_pre_hook(check)


@pytest.mark.parametrize(
    "error",
    [
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        lambda: RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
    ],
)
def test_failure_20_out_of_memory_halves_and_keeps(
    error: Callable[[], BaseException], tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer
) -> None:
    wanted = requests(tiny_tokenizer, SamplingParams(max_new_tokens=10))
    expected = draw(tiny_llama, tiny_tokenizer, wanted)
    fail_above(tiny_llama, 4, error)
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=64)
    sampler.submit(wanted)
    found = {sample.id: sample for sample in sampler.collect()}
    assert {i: s.token_ids.tolist() for i, s in found.items()} == {i: s.token_ids.tolist() for i, s in expected.items()}
    assert sampler.state()["concurrent_samples"] == 3  # 15 samples -> 7 (two groups: 6 rows) -> 3
    assert "out of memory at 15 concurrent samples; going on with 7." in sampler.notes
    resumed = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=64)
    resumed.restore(sampler.state())
    assert resumed.concurrent_samples == 3


def test_failure_20_out_of_memory_at_one_sample_stops(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    fail_above(tiny_llama, 0, lambda: torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RunError, match=r"one answer alone \(prompt test:0: 14 tokens.*Lower sampling.max_new_tokens"):
        draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, SamplingParams()))


def test_failure_20_out_of_memory_behind_ended_samples_loses_none(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = requests(tiny_tokenizer, SamplingParams(max_new_tokens=6))
    wanted[:4] = [replace(one, params=replace(one.params, max_new_tokens=2)) for one in wanted[:4]]
    expected = draw(tiny_llama, tiny_tokenizer, wanted)
    keep, failed = DenseDecoder.keep, []

    def fails_once(self: DenseDecoder, *args: Any) -> None:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        keep(self, *args)

    monkeypatch.setattr(DenseDecoder, "keep", fails_once)
    found = draw(tiny_llama, tiny_tokenizer, wanted)
    assert failed
    assert {i: s.token_ids.tolist() for i, s in found.items()} == {i: s.token_ids.tolist() for i, s in expected.items()}


def test_failure_20_out_of_memory_before_the_first_token_stops(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("stoker.engine.local.sampler.DenseDecoder", fails)
    with pytest.raises(RunError, match=r"before the first token was drawn.*Lower sampling\.max_new_tokens"):
        draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, SamplingParams()))


def test_a_new_number_of_concurrent_samples_counts_after_a_resume(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer
) -> None:
    saved = {"concurrent_samples": 8, "configured": 64, "answer_lengths": {}}  # lack of memory left 8 of 64
    for configured, concurrent in ((64, 8), (16, 16)):
        sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=configured)
        sampler.restore(saved)
        assert sampler.concurrent_samples == concurrent


def test_groups_likely_to_be_long_are_drawn_first(tiny_tokenizer: Tokenizer) -> None:
    a, b, c, d, e = prompts(tiny_tokenizer)
    short, long = SamplingParams(max_new_tokens=10), SamplingParams(max_new_tokens=40)
    wanted = [Request(p, index, short, 0) for p in (a, b, c, d) for index in range(2)] + [Request(e, 0, long, 0)]
    order = longest_first(wanted, {a.id: 3.5, b.id: 7.0, e.id: 2.0})
    assert [(one.prompt.id, one.index) for one in order] == [
        *[(c.id, 0), (c.id, 1), (d.id, 0), (d.id, 1)],  # never drawn: as long as they may be, 10
        *[(b.id, 0), (b.id, 1), (a.id, 0), (a.id, 1), (e.id, 0)],
    ]


def test_answer_lengths_are_remembered_by_prompt_and_survive_a_resume(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer
) -> None:
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=64)
    sampler.submit(requests(tiny_tokenizer, SamplingParams(max_new_tokens=10)))
    lengths: dict[str, list[int]] = {}
    for sample in sampler.collect():
        lengths.setdefault(sample.prompt.id, []).append(len(sample.token_ids))
    assert sampler.state()["answer_lengths"] == {prompt: sum(found) / 3 for prompt, found in lengths.items()}
    resumed = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=64)
    resumed.restore(json.loads(json.dumps(sampler.state())))
    assert resumed.state() == sampler.state()


def test_other_errors_are_not_read_as_out_of_memory(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    fail_above(tiny_llama, 0, lambda: RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, SamplingParams()))


def test_failure_24_context_overflow_is_refused_at_submit(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer
) -> None:
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=4)
    with pytest.raises(ModelError, match=r"prompt test:0 has 14 tokens.* 513, but LlamaForCausalLM holds 512"):
        sampler.submit(requests(tiny_tokenizer, SamplingParams(max_new_tokens=499)))
    assert list(sampler.collect()) == []


def test_diverged_weights_are_named(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    with torch.no_grad():
        tiny_llama.model.norm.weight.fill_(torch.nan)
    for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0)):
        with pytest.raises(RunError, match=r"not finite after prompt test:0 \(sample 0, token 0\)"):
            draw(tiny_llama, tiny_tokenizer, requests(tiny_tokenizer, params))


def test_failure_17_progress_at_every_token(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    seen: list[tuple[int, int, int]] = []
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=6)
    sampler.on_progress = lambda done, total, tokens: seen.append((done, total, tokens))
    sampler.submit(requests(tiny_tokenizer, SamplingParams(max_new_tokens=5)))
    drawn = sum(len(sample.token_ids) for sample in sampler.collect())
    assert seen == sorted(seen) and len(seen) >= 5 * 3
    assert seen[-1] == (15, 15, drawn)


def test_model_is_left_as_it_was(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    tiny_llama.train()
    tiny_llama.lm_head.eval()
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=6)
    sampler.submit(requests(tiny_tokenizer, SamplingParams(max_new_tokens=2)))
    for _ in sampler.collect():
        assert tiny_llama.training and torch.is_grad_enabled(), "the loop runs between two samples"
        assert not tiny_llama.lm_head.training
    tiny_llama(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert tiny_llama.lm_head.weight.grad is not None


def test_abandoned_collect_leaves_nothing_behind(tiny_llama: PreTrainedModel, tiny_tokenizer: Tokenizer) -> None:
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=3)

    def stop(_done: int, _total: int, _tokens: int) -> None:
        raise KeyboardInterrupt

    sampler.on_progress = stop
    sampler.submit(requests(tiny_tokenizer, SamplingParams(max_new_tokens=5)))
    with pytest.raises(KeyboardInterrupt):
        list(sampler.collect())
    sampler.on_progress = None
    wanted = requests(tiny_tokenizer, SamplingParams(max_new_tokens=2), seed=9)[:2]
    sampler.submit(wanted)
    assert [sample.id for sample in sampler.collect()] == ["test:0/0", "test:0/1"]
