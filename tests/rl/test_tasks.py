"""Reading, columns, split and checks: everything that needs no tokenizer."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.config.schema import Reward, RunConfig, Sampling, Source, Task, Validation, ValidationSet
from stoker.errors import DataError
from stoker.rl.tasks import TaskRows, read_rows
from stoker.rl.tasks.sources import name_of
from stoker.rl.tasks.split import hold_out, normalised


def make(*sources: Source, prompts_per_step: int = 1, rewards: str = "my.mod:score", **sections: Any) -> RunConfig:
    task = Task(sources=sources, **sections.pop("task", {}))
    return RunConfig(
        name="run",
        task=task,
        rewards=(Reward(function=rewards),),
        sampling=Sampling(prompts_per_step=prompts_per_step),
        **sections,
    )


def jsonl(folder: Path, name: str, *rows: Any) -> Path:
    file = folder / name
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return file


def rows_of(path: Path | str, **fields: Any) -> list[Any]:
    rows = read_rows(make(Source(path=str(path), **fields)))
    return next(iter(rows.train.values()))


def first_train(rows: TaskRows) -> list[Any]:
    return next(iter(rows.train.values()))


# Files


def test_jsonl_rows_keep_id_answer_and_other_columns(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "sums.jsonl", {"prompt": "1+1=", "answer": 2, "level": "easy"}, "", {"prompt": "2+2="})
    one, two = rows_of(file)
    assert (one.id, one.content, one.answer) == ("sums:0", "1+1=", "2")
    assert one.columns == {"answer": 2, "level": "easy"}
    assert (two.id, two.answer, two.place) == ("sums:1", None, f"{file}:3")


def test_csv_with_quoted_line_breaks_and_bom(tmp_path: Path) -> None:
    file = tmp_path / "q.csv"
    file.write_text('\ufeffquestion,answer\n"one\nline, more",1\ntwo,2\n', encoding="utf-8")
    one, two = rows_of(file)
    assert (one.content, one.answer, one.place) == ("one\nline, more", "1", f"{file}:2")
    assert two.place == f"{file}:4"


def test_parquet_reads_verl_rows_unchanged(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "How many?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0, "answer": "no"},
    }
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([row]), file)
    (found,) = rows_of(file)
    assert found.content == ({"role": "user", "content": "How many?"},)
    assert found.answer == "72"
    assert found.columns == {name: value for name, value in row.items() if name != "prompt"}


def test_parquet_drops_the_nulls_arrow_fills_into_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a", "name": "Jo"}, {"role": "user", "content": "b"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": messages}]), tmp_path / "p.parquet")
    assert rows_of(tmp_path / "p.parquet")[0].content == tuple(messages)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(DataError, match=r"p\.parquet can't be read"):
        rows_of(tmp_path / "p.parquet")


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "p", "completion": "c"}, "p", "c"),
        ({"prompt": "p", "solution": "s", "completion": "c"}, "p", "s"),
        ({"prompt": "p", "completion": [{"role": "assistant", "content": "c"}]}, "p", "c"),
        ({"input": "i", "label": "l"}, "i", "l"),
        ({"question": "q", "answer": "a", "info": {"k": 1}, "task": "t"}, "q", "a"),
        ({"prompt": "p", "question": "q", "answer": "a"}, "p", "a"),
        ({"prompt": "p", "answer": 46.0}, "p", "46"),
        ({"prompt": "p", "answer": float("nan")}, "p", None),
        ({"prompt": "p", "answer": ["1", "2"]}, "p", '["1", "2"]'),
    ],
)
def test_columns_of_trl_openrlhf_and_verifiers(
    tmp_path: Path, row: dict[str, Any], prompt: str, answer: str | None
) -> None:
    (found,) = rows_of(jsonl(tmp_path, "d.jsonl", row))
    assert (found.content, found.answer) == (prompt, answer)


def test_columns_can_be_named_and_nested(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "d.jsonl", {"prompt": "no", "text": "yes", "meta": {"gold": 7}})
    (found,) = rows_of(file, prompt_column="text", answer_column="meta.gold")
    assert (found.content, found.answer) == ("yes", "7")


# Folders, the hub, generators


def test_a_folder_saved_by_datasets(tmp_path: Path) -> None:
    split = tmp_path / "set" / "test"
    split.mkdir(parents=True)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (split / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    table = pa.Table.from_pylist([{"prompt": "a"}, {"prompt": "b"}])
    with (
        pa.OSFile(str(split / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    found = rows_of(tmp_path / "set", split="test")
    assert [(row.id, row.content) for row in found] == [("set-test:0", "a"), ("set-test:1", "b")]
    with pytest.raises(DataError, match=r"no split 'dev'; there is train, test"):
        rows_of(tmp_path / "set", split="dev")


def test_a_folder_of_files_by_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data", "train-00000-of-00002.jsonl", {"prompt": "a"})
    jsonl(tmp_path / "data", "train-00001-of-00002.jsonl", {"prompt": "b"})
    jsonl(tmp_path / "data", "test.jsonl", {"prompt": "c"})
    assert [row.content for row in rows_of(tmp_path)] == ["a", "b"]
    assert [row.content for row in rows_of(tmp_path, split="test")] == ["c"]
    with pytest.raises(DataError, match="no file is of split 'validation'"):
        rows_of(tmp_path, split="validation")


def test_a_folder_whose_files_name_no_split_is_all_train(tmp_path: Path) -> None:
    jsonl(tmp_path, "part1.jsonl", {"prompt": "a"})
    jsonl(tmp_path, "part2.jsonl", {"prompt": "b"})
    assert [row.content for row in rows_of(tmp_path)] == ["a", "b"]


def test_a_hub_name_goes_to_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, split: str, **kwargs: Any) -> list[dict[str, str]]:
        assert (path, split, kwargs) == ("openai/gsm8k", "train", {"name": "main"})
        return [{"question": "q", "answer": "a"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (row,) = rows_of("openai/gsm8k", kwargs={"name": "main"})
    assert (row.id, row.content) == ("gsm8k:0", "q")


def test_a_hub_name_offline_or_without_datasets_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        rows_of("openai/gsm8k")

    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"ConnectionError: no route.*local file"):
        rows_of("openai/gsm8k")


def test_a_missing_file_is_not_taken_for_a_hub_name() -> None:
    with pytest.raises(DataError, match="no such file"):
        rows_of("data/absent.jsonl")


def test_generators_by_file_and_by_module(tmp_path: Path) -> None:
    file = tmp_path / "random.py"  # must not hide the module of that name
    file.write_text(
        "import random as r\ndef rows(n=1):\n    r.Random\n    for i in range(n):\n        yield {'prompt': f'p{i}'}\n"
    )
    assert [row.id for row in rows_of(f"{file}:rows", kwargs={"n": 3})] == ["rows:0", "rows:1", "rows:2"]
    assert len(rows_of("stoker.embedded.addition:problems", kwargs={"count": 9})) == 9


def test_an_endless_generator_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g.py").write_text("def rows():\n    while True:\n        yield {'prompt': 'p'}\n")
    assert len(rows_of(f"{tmp_path}/g.py:rows", limit=5)) == 5
    monkeypatch.setattr("stoker.rl.tasks.sources.MAX_GENERATED", 10)
    with pytest.raises(DataError, match="goes on: set the source's `limit`"):
        rows_of(f"{tmp_path}/g.py:rows")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def other(): ...", "has no 'rows'; there is: other"),
        ("import absent_module", "importing .*g.py failed .*absent_module"),
        (
            "def rows():\n    yield {'prompt': 'p'}\n    raise OSError('disk')",
            "row 1: the generator raised OSError: disk",
        ),
    ],
)
def test_generator_faults_are_named(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "g.py").write_text(code)
    with pytest.raises(DataError, match=message):
        rows_of(f"{tmp_path}/g.py:rows")


def test_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    file = str(jsonl(tmp_path, "a.jsonl", {"prompt": "p"}))
    with pytest.raises(DataError, match="two data sources are called 'a'"):
        read_rows(make(Source(path=file), Source(path=file)))
    assert name_of(Source(path="org/set", split="test")) == "set-test"


# Failure rows


def test_failure_25_empty_or_tiny_dataset(tmp_path: Path) -> None:
    empty = jsonl(tmp_path, "empty.jsonl")
    with pytest.raises(DataError, match=r"'empty' .* has no rows"):
        rows_of(empty)
    tiny = jsonl(tmp_path, "tiny.jsonl", *({"prompt": f"p{i}"} for i in range(10)))
    with pytest.raises(DataError, match=r"8 training rows .*prompts_per_step = 16 .*set it to 8 or less"):
        read_rows(make(Source(path=str(tiny)), prompts_per_step=16, validation=Validation(holdout=2)))


def test_failure_25_a_weight_asks_for_more_rows_than_the_source_has(tmp_path: Path) -> None:
    few = jsonl(tmp_path, "few.jsonl", {"prompt": "x"})
    many = jsonl(tmp_path, "many.jsonl", *({"prompt": f"p{i}"} for i in range(30)))
    with pytest.raises(DataError, match=r"'few' has 1 training rows, but its weight 1 of 2 asks for 4\.0"):
        read_rows(make(Source(path=str(few)), Source(path=str(many)), prompts_per_step=8))


def test_failure_25_is_found_without_torch_or_a_tokenizer(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom stoker.config.schema import *\nfrom stoker.rl.tasks import read_rows\n"
        "s = Source(path='stoker.embedded.addition:problems', kwargs={'count': 4})\n"
        "try: read_rows(RunConfig(name='r', task=Task(sources=(s,))))\n"
        "except Exception as e: print(e)\n"
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "4 training rows" in done.stdout


def test_failure_26_duplicates_are_counted_and_keep_their_own_ids(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "d.jsonl", {"prompt": "same"}, {"prompt": " SAME "}, {"prompt": "other"})
    rows = read_rows(make(Source(path=str(file))))
    assert "1 of 3 rows repeat another row's prompt; each is its own group" in rows.notes
    assert [row.id for row in first_train(rows)] == ["d:0", "d:1", "d:2"]


def test_failure_27_missing_columns_list_what_is_there_and_what_was_tried(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "d.jsonl", {"text": "t", "gold": 1})
    with pytest.raises(DataError, match=r"found gold, text; tried prompt, input, question.*prompt_column"):
        rows_of(file)
    with pytest.raises(DataError, match="found gold, text; tried txt"):
        rows_of(file, prompt_column="txt")
    with pytest.raises(DataError, match=r"no answer column.*found gold, text; tried reward_model.ground_truth, answer"):
        read_rows(make(Source(path=str(file), prompt_column="text"), rewards="exact"))


def test_failure_28_malformed_rows_are_listed_by_line_and_capped(tmp_path: Path) -> None:
    bad: list[Any] = ["{oops", "[1]", {"prompt": ""}, {"prompt": 3}, {"prompt": [{"content": "x"}]}, {"answer": 1}]
    file = jsonl(tmp_path, "d.jsonl", {"prompt": "ok"}, *bad)
    with file.open("ab") as out:
        out.write(b'{"prompt": "\xff"}\n')
    source = Source(path=str(file))
    with pytest.raises(DataError) as caught:
        read_rows(make(source, task={"bad_rows": 6}))
    message = str(caught.value)
    assert "7 malformed rows, task.bad_rows allows 6" in message
    for line, reason in [
        (2, "not JSON: Expecting property name enclosed in double quotes at character 2"),
        (3, "a JSON list, not an object"),
        (4, "empty prompt"),
        (5, "holds a int"),
        (6, "without a `role`"),
        (7, "holds nothing"),
        (8, "not UTF-8"),
    ]:
        assert any(f"{file}:{line}: " in entry and reason in entry for entry in message.splitlines())
    allowed = read_rows(make(source, task={"bad_rows": 7}))
    assert [row.id for row in first_train(allowed)] == ["d:0"]
    assert any("7 malformed rows left out" in note and f"{file}:2" in note for note in allowed.notes)


def test_failure_28_ids_count_malformed_rows_so_that_mending_one_moves_no_other(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "d.jsonl", "broken", {"prompt": "p"})
    (row,) = first_train(read_rows(make(Source(path=str(file)), task={"bad_rows": 1})))
    assert row.id == "d:1"


def test_failure_28_csv_rows(tmp_path: Path) -> None:
    file = tmp_path / "d.csv"
    file.write_text('prompt,answer\na,1\nb\nc,2,3\n"d,4\n')
    with pytest.raises(DataError) as caught:
        rows_of(file)
    for line, reason in [(3, "1 cells where the header has 2"), (4, "3 cells"), (5, "not CSV")]:
        assert f"{file}:{line}: {reason}" in str(caught.value)


def test_a_rule_reward_needs_an_answer_in_every_row(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "d.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None})
    with pytest.raises(DataError, match=r"d\.jsonl:2: no answer in column 'answer'"):
        read_rows(make(Source(path=str(file)), rewards="math"))
    assert len(rows_of(file)) == 2  # a user's function may need none


# Split


def held(rows: TaskRows) -> set[str]:
    return {str(row.content) for row in rows.validation["holdout"]}


def test_holdout_is_disjoint_and_keeps_duplicates_on_one_side(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "d.jsonl", *({"prompt": f"p{i % 40}"} for i in range(100)))
    rows = read_rows(make(Source(path=str(file)), validation=Validation(holdout=10)))
    train = {row.content for row in first_train(rows)}
    assert len(rows.validation["holdout"]) == len(held(rows)) == 10
    assert not train & held(rows)
    assert len(train) == 30


def test_holdout_no_trained_row_becomes_held_out_when_rows_are_appended(tmp_path: Path) -> None:
    before = [{"prompt": f"p{i}"} for i in range(200)]
    old = read_rows(make(Source(path=str(jsonl(tmp_path, "a.jsonl", *before))), validation=Validation(holdout=50)))
    more = [*before, *({"prompt": f"q{i}"} for i in range(20))]
    new = read_rows(make(Source(path=str(jsonl(tmp_path, "b.jsonl", *more))), validation=Validation(holdout=50)))
    assert {text for text in held(new) if text.startswith("p")} <= held(old)
    assert len(held(new) & held(old)) >= 35


def test_holdout_depends_on_the_seed_and_not_on_the_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}"} for i in range(100)]
    forward = make(Source(path=str(jsonl(tmp_path, "a.jsonl", *rows))), validation=Validation(holdout=20))
    backward = make(Source(path=str(jsonl(tmp_path, "b.jsonl", *rows[::-1]))), validation=Validation(holdout=20))
    assert held(read_rows(forward)) == held(read_rows(backward))
    assert held(read_rows(forward)) != held(read_rows(forward.model_copy(update={"seed": 1})))


def test_holdout_of_everything_is_refused(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "d.jsonl", {"prompt": "a"}, {"prompt": "a"})
    with pytest.raises(DataError, match="1 different prompts in 2 rows"):
        read_rows(make(Source(path=str(file)), validation=Validation(holdout=1)))


def test_hold_out_keeps_every_row_or_counts_it(tmp_path: Path) -> None:
    source = Source(path=str(jsonl(tmp_path, "d.jsonl", *({"prompt": f"p{i % 7}"} for i in range(30)))))
    rows = first_train(read_rows(make(source)))
    train, out, copies = hold_out(rows, 3, seed=0)
    assert len(train) + len(out) + copies == 30
    assert {normalised(row.content) for row in train} & {normalised(row.content) for row in out} == set()


def test_validation_sets_are_cut_to_rows_and_overlap_is_told(tmp_path: Path) -> None:
    train = jsonl(tmp_path, "train.jsonl", *({"prompt": f"p{i}"} for i in range(20)))
    extra = jsonl(tmp_path, "extra.jsonl", *({"prompt": f"p{i}"} for i in range(15, 25)))
    sets = (ValidationSet(path=str(extra)), ValidationSet(path=str(extra), name="part", rows=4))
    rows = read_rows(make(Source(path=str(train)), validation=Validation(sets=sets)))
    assert {name: len(found) for name, found in rows.validation.items()} == {"extra": 10, "part": 4}
    assert "extra: 5 of its prompts are trained on too" in rows.notes


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "1+1=", "answer": ' + "9" * 5000 + "}", "not JSON"),
        ('{"prompt": "\\ud800", "answer": "2"}', "half a surrogate pair"),
        ('{"prompt": "1+1=", "answer": "  "}', "no answer in column 'answer'"),
    ],
)
def test_failure_28_rows_that_would_crash_later_are_malformed(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+2=", "answer": "3"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*{reason}"):
        read_rows(make(Source(path=str(file)), rewards="exact"))


def test_a_generator_that_refuses_its_arguments_is_named(tmp_path: Path) -> None:
    (tmp_path / "g.py").write_text("def rows(count): yield {'prompt': 'p'}")
    with pytest.raises(DataError, match=r"kwargs = {'digits': 1} raised TypeError: .*'digits'"):
        rows_of(f"{tmp_path}/g.py:rows", kwargs={"digits": 1})


def test_a_file_whose_name_can_not_name_a_source(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "a" * 80 + ".jsonl", {"prompt": "p"})
    with pytest.raises(DataError, match="give it a `name` of letters"):
        read_rows(make(Source(path=str(file))))
