"""What is pulled, what is promised, and how a saving is told; the processes themselves are the bench's affair."""

from dataclasses import replace

import pytest

from bench import memory_levers
from bench.memory_levers import BASE, LEVERS, MODELS, Row
from stoker.memory import Setup, levers, predict


@pytest.mark.parametrize("model", MODELS)
def test_a_lever_of_the_ladder_is_pulled_as_the_ladder_pulls_it(model: str) -> None:
    of = memory_levers.shape(model)
    whole = predict(of, BASE).peak
    ladder = {lever.name: lever.saves for lever in levers(of, BASE)}
    shared = ladder.keys() & LEVERS.keys()
    assert len(shared) == 8
    for name in shared:
        assert ladder[name] == whole - predict(of, replace(BASE, **LEVERS[name])).peak


@pytest.mark.parametrize("model", MODELS)
def test_every_lever_has_a_prediction_and_those_of_a_gpu_come_last(model: str) -> None:
    found = memory_levers.predicted(memory_levers.shape(model))
    assert list(found) == [*LEVERS, "8-bit optimizer", "optimizer offload"]
    # AdamW's two moments in fp32, with one of them left out.
    assert found["SGD with momentum for AdamW"] == 4 * memory_levers.shape(model).parameters


def test_a_saving_is_the_growth_without_less_that_with(capsys: pytest.CaptureFixture[str]) -> None:
    def growth(model: str, setup: Setup) -> int:
        return 700 << 20 if setup == BASE else (600 if setup.optimizer == "sgd_momentum" else 500) << 20

    rows = memory_levers.measure(["llama"], ["checkpointing", "SGD with momentum for AdamW"], growth)
    assert [(row.lever, row.measured) for row in rows] == [
        ("checkpointing", 200 << 20),
        ("SGD with momentum for AdamW", 100 << 20),
        ("8-bit optimizer", None),
        ("optimizer offload", None),
    ]
    assert "llama, checkpointing: predicted to save 278 MiB of 700, measured 200 (+39%)" in capsys.readouterr().out


def test_the_table() -> None:
    mib = 2**20
    saves = {"x": (50, 40), "y": (7, None), "z": (0, 0.5)}
    rows = [
        Row("a", lever, said * mib, None if found is None else found * mib, 100 * mib)
        for lever, (said, found) in saves.items()
    ]
    assert memory_levers.table([*rows, *(replace(row, model="b", whole=200 * mib) for row in rows)]).splitlines() == [
        "| lever | a: predicted | measured | off by | b: predicted | measured | off by |",
        "|---|---|---|---|---|---|---|",
        "| x | 50 | 40 | +25% | 50 | 40 | +25% |",
        "| y | 7 | – | – | 7 | – | – |",
        "| z | 0 | 0 | – | 0 | 0 | – |",
    ]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft, of transformers
@pytest.mark.parametrize("change", LEVERS.values(), ids=LEVERS)
def test_every_lever_trains(change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_levers, "CHUNK", 5)
    step = memory_levers._trained("llama", replace(replace(BASE, **change), examples=2, tokens=8), tiny=True)
    step()


def test_chunks_of_logits_give_the_same_loss() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(memory_levers._config("gpt2", tiny=True)).eval()
    ids = torch.randint(0, 64, (2, 9))
    whole = memory_levers._whole(model, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_levers, "CHUNK", 5)
        chunked = memory_levers._chunked(model, ids)
    assert chunked.item() == pytest.approx(whole.item(), rel=1e-6)
