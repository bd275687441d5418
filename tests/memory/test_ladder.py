import json
from dataclasses import replace

from stoker.memory import Setup, levers, predict, shape_of
from tests.memory.test_families import LLAMA_8B
from tests.memory.test_prediction import BERT_LARGE

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
SETUP = Setup(examples=8, tokens=1024, attention="eager")


def test_from_cheap_to_dear() -> None:
    found = levers(shape_of(GPT2), SETUP)
    assert [lever.name for lever in found] == [
        "mixed precision",
        "freeing temporaries",
        "flash attention",
        "chunked logits",
        "half the input length",
        "half the micro-batch",
        "checkpointing",
        "8-bit optimizer",
        "optimizer offload",
        "adapters",
        "fragmentation",
    ]
    assert all(lever.costs and lever.how for lever in found)


def test_savings_are_differences_of_predictions() -> None:
    shape = shape_of(GPT2)
    before = predict(shape, SETUP).peak
    found = {lever.name: lever for lever in levers(shape, SETUP)}
    alone = predict(shape, replace(SETUP, checkpointing=True)).peak
    assert found["checkpointing"].saves == before - alone > 0
    for lever in found.values():
        assert lever.peak == predict(shape, lever.setup).peak
    assert found["half the input length"].setup.tokens == 512
    assert found["checkpointing"].setup.tokens == 1024  # the rest is for the batch that was asked for


def test_what_is_pulled_already_is_left_out() -> None:
    pulled = Setup(1, 1, precision="bf16", optimizer="sgd", checkpointing=True, lora_rank=4, offload=True)
    assert [lever.name for lever in levers(shape_of(GPT2), pulled)] == ["fragmentation"]


def test_combined_a_batch_of_8_becomes_32_and_more() -> None:
    """The worked example: mixed precision, checkpointing and an 8-bit optimizer on a device that 8 examples fill."""
    found = {lever.name: lever for lever in levers(shape_of(BERT_LARGE), replace(SETUP, tokens=512))}
    assert 8 < found["mixed precision"].most_examples < 32
    assert found["checkpointing"].most_examples >= 32


def test_kept_outputs_are_dropped() -> None:
    setup = Setup(1, 512, optimizer="sgd", loss="cross_entropy, outputs kept")
    freed = next(lever for lever in levers(shape_of(GPT2), setup) if lever.name == "freeing temporaries")
    assert freed.saves == 512 * 50257 * 4


def test_mixed_precision_halves_activations_and_no_states() -> None:
    shape = shape_of(LLAMA_8B)
    fp32, autocast = (predict(shape, Setup(1, 1024, precision=name)) for name in ("fp32", "autocast"))
    states = ("weights", "gradients", "optimizer states")
    assert [fp32.row(name) for name in states] == [autocast.row(name) for name in states]
    # 24 h + 8 q + 8 k + 16 f + 4 a + 8 and 26 h + 4 q + 4 k + 8 f + 4 a + 8 bytes a token and layer
    assert fp32.row("activations") == 32 * 1024 * 368_776
    assert autocast.row("activations") == 32 * 1024 * 241_800


def test_savings_shown_and_in_json() -> None:
    lever = levers(shape_of(GPT2), SETUP)[0]
    assert json.loads(json.dumps(lever.to_json()))["setup"]["precision"] == "autocast"
    assert str(lever).startswith("mixed precision: saves ") and "examples fit" in str(lever)
