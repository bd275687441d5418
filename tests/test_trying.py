"""Talking to a checkpoint: whose run file is taken."""

from pathlib import Path

from stoker.trying import _run_file


def test_only_the_run_that_saved_a_policy_says_how_to_ask_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    policy = run / "checkpoints" / "step_2" / "policy"
    model = tmp_path / "models" / "mine"
    for folder in (policy, model):
        folder.mkdir(parents=True)
    (run / "config.toml").write_text("")
    (tmp_path / "config.toml").write_text("title = 'of some other program'")
    assert _run_file(policy) == run / "config.toml"
    assert _run_file(model) is None
