"""The docs tell the truth: generated pages are fresh, lists are complete, named tests exist."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["make_config_docs.py", "make_metric_docs.py"])
def test_generated_reference_is_up_to_date(script: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_requirement_is_listed_once() -> None:
    listed = re.findall(r"^\| ([BRCD]\d+b?) \|", page("requirements.md"), re.MULTILINE)
    counts = {"B": 31, "R": 24, "C": 7, "D": 11}
    expected = {f"{letter}{number}" for letter, count in counts.items() for number in range(1, count + 1)} | {"R7b"}
    assert len(listed) == len(set(listed))
    assert set(listed) == expected


def test_every_fault_names_the_tests_that_hold_it() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_fault_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_tests_named_in_the_requirements_exist() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert set(re.findall(r"`(test_\w+)`", page("requirements.md"))) <= defined
    for status in re.findall(r"^\| R\d+b? \|.*\| (done[^|]*) \|$", page("requirements.md"), re.MULTILINE):
        assert "`test_" in status


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [path.name for path in (ROOT / "docs").glob("*.md") if path.name not in navigation] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulation.md", "multi_device.md", "noise.md", "schedules.md"])
def test_examples_of_the_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python blocks as one script; those with a title are files beside it."""
    script = ""
    for title, code in re.findall(r"^```python(?: title=\"(.+?)\")?\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL):
        if title:
            (tmp_path / title).write_text(code, encoding="utf-8")
        else:
            script += code
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    runpy.run_path(str(tmp_path / "script.py"))
