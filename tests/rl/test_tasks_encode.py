"""Token ids of prompts: templates, special tokens, long prompts, and the tokenizers that lack something."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from stoker.config.schema import Model, RunConfig, Sampling, Source, Task, Validation
from stoker.errors import DataError, ModelError
from stoker.rl.tasks import TaskData, load, read_rows

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<system>", "<user>", "<assistant>"]
WORDS = [*SPECIAL, "one", "two", "three", "four", "five", "be", "brief"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content }} "
    "{% if not loop.last or m.role != 'assistant' %}{{ eos_token }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if shout is defined %} {{ shout }}{% endif %}"
)


def words(
    *, template: str | None = TEMPLATE, specials: Sequence[str] = ("pad", "bos", "eos")
) -> PreTrainedTokenizerFast:
    """A word tokenizer that writes BOS before and EOS after plain text, as some do."""
    names = {"pad": "<pad>", "bos": "<s>", "eos": "</s>"}
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", **{f"{name}_token": names[name] for name in specials}
    )
    tokenizer.chat_template = template
    return tokenizer


def text(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(list(ids)))


def config(tmp_path: Path, *prompts: Any, stop: tuple[str, ...] = (), holdout: int = 0, **task: Any) -> RunConfig:
    code = f"def rows():\n    for p in {list(prompts)!r}:\n        yield {{'prompt': p}}\n"
    (tmp_path / "gen.py").write_text(code)
    return RunConfig(
        name="run",
        model=Model(path="models/words"),
        task=Task(sources=(Source(path=f"{tmp_path}/gen.py:rows"),), shuffle=False, **task),
        rewards=({"function": "my.mod:score"},),  # type: ignore[arg-type]
        validation=Validation(holdout=holdout),
        sampling=Sampling(prompts_per_step=1, max_new_tokens=4, stop=stop),
    )


def first(data: TaskData) -> tuple[int, ...]:
    return data.train.take(1)[0].token_ids


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_plain_text_keeps_its_bos_and_gets_no_eos(tmp_path: Path) -> None:
    tokenizer = words()
    assert text(tokenizer, first(load(config(tmp_path, "one two"), tokenizer))) == "<s> one two"


def test_plain_text_that_writes_its_own_bos_gets_no_second(tmp_path: Path) -> None:
    tokenizer = words()
    assert text(tokenizer, first(load(config(tmp_path, "<s> one"), tokenizer))) == "<s> one"


def test_messages_get_one_bos_from_the_template(tmp_path: Path) -> None:
    tokenizer = words()
    assert text(tokenizer, first(load(config(tmp_path, [user("one")]), tokenizer))) == "<s> <user> one </s> <assistant>"


@pytest.mark.parametrize(
    ("task", "prompt", "expected"),
    [
        ({"system_prompt": "be brief"}, "one", "<s> <system> be brief </s> <user> one </s> <assistant>"),
        ({"chat": "always"}, "one", "<s> <user> one </s> <assistant>"),
        ({"chat": "always", "chat_template_kwargs": {"shout": "two"}}, "one", "<s> <user> one </s> <assistant> two"),
        (
            {"system_prompt": "be brief"},
            [{"role": "system", "content": "three"}, user("one")],  # the row's own wins
            "<s> <system> three </s> <user> one </s> <assistant>",
        ),
        ({}, [user("one"), {"role": "assistant", "content": "two"}], "<s> <user> one </s> <assistant> two"),
    ],
)
def test_chat_prompts(tmp_path: Path, task: dict[str, Any], prompt: Any, expected: str) -> None:
    tokenizer = words()
    assert text(tokenizer, first(load(config(tmp_path, prompt, **task), tokenizer))) == expected


def test_prompts_show_reward_functions_what_the_row_said(tmp_path: Path) -> None:
    (prompt,) = load(config(tmp_path, [user("one")], system_prompt="be brief"), words()).train.take(1)
    assert prompt.content == (user("one"),)
    assert (prompt.id, prompt.source) == ("rows:0", "rows")


@pytest.mark.parametrize(
    ("task", "prompt"), [({"chat": "never"}, [user("one")]), ({"chat": "never", "system_prompt": "be brief"}, "one")]
)
def test_chat_never_contradicts_messages_and_system_prompts(tmp_path: Path, task: dict[str, Any], prompt: Any) -> None:
    with pytest.raises(DataError, match=r"task.chat = 'never'"):
        load(config(tmp_path, prompt, **task), words())


def test_failure_24_long_prompts_are_listed_never_cut(tmp_path: Path) -> None:
    prompts = ["one", "one two three four five", "one two three four"]
    with pytest.raises(DataError, match=r"2 prompts have more than 4 tokens .*rows:1 \(6\), rows:2 \(5\)"):
        load(config(tmp_path, *prompts, max_prompt_tokens=4), words())
    data = load(config(tmp_path, *prompts, max_prompt_tokens=4, long_prompts="drop"), words())
    assert data.train.rows == 1
    assert any("rows:1 (6), rows:2 (5); left out" in note for note in data.notes)


def test_failure_24_the_context_leaves_room_for_the_answer(tmp_path: Path) -> None:
    tokenizer = words()
    tokenizer.model_max_length = 8
    with pytest.raises(DataError, match=r"more than 4 tokens \(the context of 8 less sampling.max_new_tokens = 4\)"):
        load(config(tmp_path, "one two three four five"), tokenizer)


def test_failure_25_too_few_rows_are_left_after_dropping(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 training rows"):
        load(config(tmp_path, "one two three", max_prompt_tokens=2, long_prompts="drop"), words())


def test_failure_32_pad_is_eos_and_said(tmp_path: Path) -> None:
    data = load(config(tmp_path, "one"), words(specials=("bos", "eos")))
    assert any("no pad token: padded with EOS '</s>'" in note for note in data.notes)
    tokenizer = words(specials=("bos", "eos"))
    tokenizer.pad_token = tokenizer.eos_token  # as the loader leaves it
    assert any("no pad token: padded with EOS '</s>'" in n for n in load(config(tmp_path, "one"), tokenizer).notes)


def test_failure_32_no_eos_needs_a_stop_string(tmp_path: Path) -> None:
    tokenizer = words(specials=("pad", "bos"))
    with pytest.raises(ModelError, match=r"models/words has no EOS token.*set sampling\.stop"):
        load(config(tmp_path, "one"), tokenizer)
    data = load(config(tmp_path, "one", stop=("five",)), tokenizer)
    assert any("answers end only at sampling.stop = ['five']" in note for note in data.notes)


def test_failure_33_no_chat_template_names_the_model_and_the_fix(tmp_path: Path) -> None:
    tokenizer = words(template=None)
    with pytest.raises(DataError, match=r"model models/words has no chat template, and rows:0 .* instruction-tuned"):
        load(config(tmp_path, [user("one")]), tokenizer)
    assert first(load(config(tmp_path, "one"), tokenizer))  # plain text needs none


def test_a_template_that_refuses_a_row_names_it(tmp_path: Path) -> None:
    tokenizer = words(template="{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match=r"rows:0 .*chat template of models/words refuses it .*no system role"):
        load(config(tmp_path, [user("one")]), tokenizer)


def test_rows_read_before_are_not_read_again(tmp_path: Path) -> None:
    run = config(tmp_path, "one", "two")
    rows = read_rows(run)
    (tmp_path / "gen.py").unlink()
    assert load(run, words(), rows).train.rows == 2


def test_validation_prompts_are_encoded_too(tmp_path: Path) -> None:
    data = load(config(tmp_path, "one", "two", "three", holdout=1), words())
    (prompt,) = data.validation["holdout"]
    assert len(prompt.token_ids) == 2
    assert prompt.id not in {p.id for p in data.train.take(2)}
