"""The embedded model and its task."""

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stoker.config.schema import Reward, RunConfig, Sampling, Source, Task, Validation
from stoker.embedded import folder
from stoker.embedded.addition import problems
from stoker.rl.tasks import load, read_rows

ROOT = Path(__file__).parents[2]


def script(name: str, where: str = "scripts") -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / where / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_model_has_the_tokenizers_vocabulary_and_under_a_million_parameters() -> None:
    config = AutoConfig.from_pretrained(folder())
    tokenizer = AutoTokenizer.from_pretrained(folder())
    assert config.vocab_size == len(tokenizer)
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer.model_max_length == config.max_position_embeddings
    model = AutoModelForCausalLM.from_config(config)
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1e6


def test_one_token_a_character_there_and_back() -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder())
    text = "12+34=  46, is\nit?"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer("Z")["input_ids"] == [tokenizer.unk_token_id]


def test_the_committed_tokenizer_is_what_the_script_makes(tmp_path: Path) -> None:
    script("make_embedded_tokenizer").build().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (folder() / name).read_text()


def test_an_unknown_embedded_model_is_named() -> None:
    with pytest.raises(ValueError, match="no embedded model 'huge'; there is tiny"):
        folder("huge")


def test_problems_are_right_different_and_seeded() -> None:
    rows = list(problems(digits=2, count=500, seed=3))
    assert len({row["prompt"] for row in rows}) == 500
    for row in rows:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert len(a) == len(b) == 2
        assert int(a) + int(b) == int(row["answer"])
    assert rows == list(problems(digits=2, count=500, seed=3))
    assert rows != list(problems(digits=2, count=500, seed=4))
    assert len(list(problems(digits=1, count=81))) == 81
    with pytest.raises(ValueError, match="make 81 different sums"):
        list(problems(digits=1, count=82))


def test_the_addition_task_loads_with_disjoint_held_out_prompts() -> None:
    config = RunConfig(
        name="addition",
        task=Task(sources=(Source(path="stoker.embedded.addition:problems", kwargs={"count": 300}),)),
        rewards=(Reward(function="exact"),),
        validation=Validation(holdout=64),
        sampling=Sampling(max_new_tokens=4),
    )
    data = load(config, AutoTokenizer.from_pretrained(folder()))
    held = {prompt.content for prompt in data.validation["holdout"]}
    assert len(held) == 64
    assert data.train.rows == 236
    assert not held & {prompt.content for prompt in data.train.take(236)}


def test_the_arithmetic_example_is_right_and_different() -> None:
    source = Source(path=f"{ROOT}/examples/arithmetic.py:problems")
    run = RunConfig(name="r", task=Task(sources=(source,)), validation=Validation(holdout=200))
    rows = read_rows(run)
    train = rows.train["problems"]
    assert len(train) == 800
    assert Counter(row.columns["kind"] for row in [*train, *rows.validation["holdout"]]).most_common()[-1][1] == 200
    signs = {"plus": "+", "minus": "-", "gets": "+", "gives": "-", "boxes": "*"}
    for row in train:
        assert not isinstance(row.content, str)
        a, b = (int(word.rstrip("?.")) for word in row.content[-1]["content"].split() if word.rstrip("?.").isdigit())
        results = {"+": a + b, "-": a - b, "*": a * b}
        assert results[signs[row.columns["kind"]]] == int(row.answer or "")
