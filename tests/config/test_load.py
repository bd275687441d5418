"""Run files: readable errors, overrides, exact round trips."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.config.load import from_dict, load, run_folder, to_toml
from stoker.config.schema import RunConfig
from stoker.errors import ConfigError

MINIMAL = {"name": "first", "task": {"sources": [{"path": "rows.jsonl"}]}}


def message(data: object, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_dict(data, overrides)  # type: ignore[arg-type]
    return str(caught.value)


def test_load_reads_a_file_and_applies_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "first"\n[task]\nsources = [{ path = "rows.jsonl" }]\n[sampling]\ntemperature = 1\n')
    config = load(file, ["sampling.top_p=0.9", "model.path=Qwen/some-model"])
    assert (config.sampling.temperature, config.sampling.top_p, config.model.path) == (1.0, 0.9, "Qwen/some-model")


def test_missing_file_names_it_and_the_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: no such file; `stoker init"):
        load(tmp_path / "absent.toml")


def test_malformed_toml_gives_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "a"\n\nseed = = 3\n')
    with pytest.raises(ConfigError, match=r"run.toml:3: not TOML: .*\n  seed = = 3"):
        load(file)
    file.write_text('name = "a"\nseed =')
    with pytest.raises(ConfigError, match=r"run.toml:2: not TOML"):
        load(file)


def test_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="can't be read as UTF-8"):
        load(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({"sampling": {"temprature": 1.0}}, "sampling.temprature: unknown key; did you mean sampling.temperature?"),
        ({"temperature": 1.0}, "temperature: unknown key; did you mean sampling.temperature?"),
        ({"smapling": {}}, "smapling: unknown key; did you mean sampling?"),
        (
            {"rewards": [{"function": "math", "wieght": 1}]},
            "rewards.0.wieght: unknown key; did you mean rewards.0.weight?",
        ),
        (
            {"critic": {"optimizer": {"lr": 1}}},
            "critic.optimizer.lr: unknown key; stoker calls it optimizer.learning_rate",
        ),
        ({"update": {"batch_size": 8}}, "update.batch_size: unknown key; stoker has no batch size without a unit"),
        ({"learning_rate": 1e-5}, "learning_rate: unknown key; stoker calls it optimizer.learning_rate"),
        ({"algorithm": {"epsilon": 0.1}}, "algorithm.epsilon: unknown key; stoker calls it algorithm.clip_low"),
        ({"optimizer": {"epsilon": 1e-6}}, "optimizer.epsilon: unknown key; did you mean optimizer.eps?"),
        (
            {"optimizer": {"warmup_ratio": 0.1}},  # not warmup_stop_ratio, though that is nearer
            "optimizer.warmup_ratio: unknown key; stoker calls it optimizer.warmup_fraction",
        ),
        ({"stop": {"xyzzy": 1}}, "stop.xyzzy: unknown key; stop has steps, max_nonfinite_updates"),
    ],
)
def test_unknown_key_names_its_path_and_the_nearest(patch: dict[str, object], expected: str) -> None:
    assert expected in message(MINIMAL | patch)


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature = 'hot': must be a number"),
        ({"sampling": {"prompts_per_step": 16.0}}, "sampling.prompts_per_step = 16.0: must be a whole number"),
        ({"sampling": {"prompts_per_step": "16"}}, "sampling.prompts_per_step = '16': must be a whole number"),
        ({"seed": True}, "seed = True: must be a whole number"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p = 2: must be less than or equal to 1"),
        (
            {"model": {"dtype": "bfloat"}},
            "model.dtype = 'bfloat': must be 'float32', 'bfloat16', 'float16' or 'auto'; did you mean 'bfloat16'?",
        ),
        ({"rewards": [{"function": "maths"}]}, "rewards.0.function: no built-in reward 'maths'; did you mean 'math'?"),
        ({"rewards": [{"function": "mine.py"}]}, "'mine.py' is a file: name the function in it, `mine.py:fn`"),
        ({"kl": 3}, "kl = 3: must be a table"),
        ({"task": {"sources": []}}, "task.sources: needs at least 1 entry, 0 given"),
        ({"optimizer": {"betas": [0.9, 0.9, 0.9]}}, "optimizer.betas: needs at most 2 entries, 3 given"),
        ({"kl": {"coefficient": float("inf")}}, "kl.coefficient = inf: must be a finite number"),
        ({"rewards": [{"function": "math", "weight": float("nan")}]}, "rewards.0.weight = nan: must be a number"),
        *[
            (
                {"update": {"tokens_per_microbatch": value}},
                f"_microbatch = {value!r}: must be a whole number above 0, or 'auto'",
            )
            for value in (0, 16.0, True, "4096", "Auto")
        ],
        ({"update": {"samples_per_update": 7}}, "does not divide the 128 samples of a step"),
    ],
)
def test_wrong_values_say_what_was_given_and_what_is_allowed(patch: dict[str, object], expected: str) -> None:
    text = message(MINIMAL | patch)
    assert expected in text
    assert "pydantic" not in text
    assert "validation error" not in text


def test_a_micro_batch_may_be_left_to_the_fit() -> None:
    config = from_dict(MINIMAL, ["update.tokens_per_microbatch=auto"])
    assert config.update.tokens_per_microbatch == "auto"
    assert from_dict(tomllib.loads(to_toml(config))) == config
    with pytest.raises(ConfigError, match=r"'auto' becomes a number when a run starts .*here give one"):
        config.update.microbatch_tokens  # noqa: B018
    assert from_dict(MINIMAL).update.microbatch_tokens == 4096


def test_missing_keys_say_what_to_write() -> None:
    text = message({})
    assert "name: missing" in text
    assert "task: missing; a run needs a [task]" in text


def test_all_faults_are_listed_once() -> None:
    text = message(MINIMAL | {"seed": "x", "rewards": [{"function": "math", "weight": "y"}]})
    assert text.splitlines() == [
        "run config:",
        "  seed = 'x': must be a whole number",
        "  rewards.0.weight = 'y': must be a number",
    ]


def test_overrides_reach_lists_defaults_and_new_entries() -> None:
    config = from_dict(
        MINIMAL, ["rewards.0.weight=2", "optimizer.betas.1=0.99", "task.sources.1.path=more.csv", "seed=4"]
    )
    assert config.rewards[0].function == "math"
    assert config.rewards[0].weight == 2
    assert config.optimizer.betas == (0.9, 0.99)
    assert [source.path for source in config.task.sources] == ["rows.jsonl", "more.csv"]
    assert config.seed == 4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("temperature", "write it as path=value"),
        ("=3", "write it as path=value"),
        ("a..b=3", "write it as path=value"),
        ("rewards.2.weight=1", "rewards is a list of 1"),
        ("rewards.first.weight=1", "rewards is a list of 1"),
        ("name.x=1", "name is 'first', which has no part 'x'"),
        ("rewards.0.range=[0, 1", "begins like a TOML list"),
        ("sampling.temprature=1", "did you mean sampling.temperature?"),
        ("name=7", "name = 7: must be text in quotes"),
    ],
)
def test_bad_overrides_are_explained(override: str, expected: str) -> None:
    assert expected in message(MINIMAL, override)


def test_override_with_a_second_line_is_text_not_more_toml() -> None:
    assert from_dict(MINIMAL, ["task.system_prompt=1\nseed = 3"]).task.system_prompt == "1\nseed = 3"


def test_the_callers_data_is_left_alone() -> None:
    data = {"name": "first", "task": {"sources": [{"path": "rows.jsonl"}]}, "sampling": {"top_p": 0.5}}
    from_dict(data, ["sampling.top_p=0.9"])
    assert data["sampling"] == {"top_p": 0.5}


@pytest.mark.parametrize("name", ["../evil", "a/b", "..", ".", "", ".hidden", "-rf", "a b", "a\n", "x" * 101, "ü"])
def test_failure_40_run_name_outside_the_allow_list(name: str) -> None:
    assert "a run's name has 1 to 100 letters" in message(MINIMAL | {"name": name})


def test_failure_40_run_folder_that_is_a_link_out(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "first").symlink_to(tmp_path)
    assert "a link that leaves" in message(MINIMAL | {"runs_dir": str(tmp_path / "runs")})


def test_run_folder_is_directly_inside_runs_dir(tmp_path: Path) -> None:
    config = from_dict(MINIMAL | {"runs_dir": str(tmp_path)})
    assert run_folder(config) == tmp_path.resolve() / "first"


def test_a_date_is_refused_with_its_path() -> None:
    data = tomllib.loads('name = "a"\n[task]\nsources = [{ path = "x", kwargs = { day = 2024-01-01 } }]')
    assert "task.sources.0.kwargs.day = 2024-01-01: a date can't stand in a run file" in message(data)


def test_to_toml_writes_every_default_and_no_none() -> None:
    text = to_toml(from_dict(MINIMAL))
    data = tomllib.loads(text)
    assert data["sampling"]["prompts_per_step"] == 16
    assert "dtype" not in data["reference"]


_values = st.recursive(
    st.text() | st.integers(-(2**53), 2**53) | st.booleans() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc XY.", min_size=1), inner, max_size=3),
    max_leaves=8,
)


@given(
    kwargs=st.dictionaries(st.text(min_size=1, max_size=5), _values, max_size=4),
    system_prompt=st.text(),
    rate=st.floats(1e-12, 1.0, exclude_min=True),
    seed=st.integers(-(2**60), 2**60),
    bounds=st.none() | st.tuples(st.floats(-1e6, 0), st.floats(0, 1e6)),
)
def test_to_toml_round_trips_exactly(
    kwargs: dict[str, object], system_prompt: str, rate: float, seed: int, bounds: tuple[float, float] | None
) -> None:
    source = {"path": "rows.jsonl", "kwargs": kwargs}
    config = from_dict(
        {
            "name": "first",
            "seed": seed,
            "task": {"sources": [source, {"path": "two"}], "system_prompt": system_prompt},
            "optimizer": {"learning_rate": rate},
            "rewards": [{"function": "math", "range": bounds}],
            "validation": {"sets": [{"path": "v"}]},
        }
    )
    again = from_dict(tomllib.loads(to_toml(config)))
    assert again == config
    assert isinstance(again, RunConfig)


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({"seed": 2**63}, "seed: whole numbers go from"),
        ({"runs_dir": "a\0b"}, "holds a NUL character"),
        ({"runs_dir": ""}, "runs_dir = '': must not be empty"),
        ({"start_from": "\udcff"}, "is not valid Unicode"),
        ({"model": {"threads": 100_000}}, "model.threads = 100000: must be less than or equal to 1024"),
        ({"task": {"sources": [{"path": ""}]}}, "task.sources.0.path = '': must not be empty"),
        ({"validation": {"sets": [{"path": "v", "name": "../x"}]}}, "may hold letters, digits, spaces"),
        ({"rewards": [{"function": "math", "name": "a/b"}]}, "may hold letters, digits, spaces"),
        ({"rewards": [{"function": "math", "weight": float("inf")}]}, "must be a finite number"),
        ({"optimizer": {"betas": [1.0, 0.9]}}, "optimizer.betas.0 = 1.0: must be less than 1"),
        ({"sampling": {"temperature": 1e-300}}, "must be greater than or equal to 0.001"),
        ({"algorithm": {"clip_high": 1e39}}, "clip_high = 1e+39 is more than float32 holds: use at most 3.4e+38"),
        ({"critic": {"optimizer": {"eps": 1e300}}}, "eps = 1e+300 is more than float32 holds"),
        ({"rewards": [{"function": "math", "workers": 100_000}]}, "must be less than or equal to 256"),
        ({"sampling": {"stop": [""]}}, "sampling.stop.0 = '': must not be empty"),
        ({"kl": {"estimator": "k1"}}, "k1' in the loss (the default of grpo and its kin) has no gradient but that of"),
        ({"kl": {"estimator": "k3"}, "algorithm": {"name": "ppo"}}, "is only right with kl.estimator = 'k1'"),
        ({"kl": {"adaptive": True, "coefficient": 0.0}}, "nothing to adapt at kl.coefficient = 0"),
        (
            {"kl": {"adaptive": True, "horizon_samples": 25}},
            "kl.horizon_samples = 25 is too short for steps of 128 samples: set it above 25",
        ),
    ],
)
def test_values_that_would_break_a_run_later_are_refused_at_once(patch: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict({"name": "first", "task": {"sources": [{"path": "rows.jsonl"}]}, **patch})
    assert expected in str(error.value)


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 5000 + "]" * 5000])
def test_absurd_toml_is_an_error_not_a_crash(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"seed = {text}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="not TOML"):
        load(file)
    with pytest.raises(ConfigError):
        from_dict({"name": "first", "task": {"sources": [{"path": "rows.jsonl"}]}}, [f"seed={text}"])


def test_byte_order_mark_at_the_start_of_a_run_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "first"\ntask = { sources = [{ path = "v" }] }\n', encoding="utf-8-sig")
    assert load(file).name == "first"
