"""The shape of the code: sizes, cycles, and what may be imported without torch."""

import ast
import graphlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import grimp
import pytest

import stoker

SOURCE = Path(stoker.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
LONGEST_MODULE = 300
LONGEST_FUNCTION = 60
TORCH_FREE = (
    "stoker.config",
    "stoker.batch.account",
    "stoker.batch.certificate",
    "stoker.batch.changing",
    "stoker.batch.controllers",
    "stoker.batch.critical.branched",
    "stoker.batch.critical.measured",
    "stoker.batch.critical.reached",
    "stoker.batch.critical.tuning",
    "stoker.batch.horizons",
    "stoker.batch.rates",
    "stoker.batch.scaling",
    "stoker.batch.stages",
    "stoker.batch.warmup",
    "stoker.memory",
    "stoker.batch.bridges.shares",
    "stoker.batch.certificate",
    "stoker.batch.explaining.accounts",
    "stoker.batch.explaining.explained",
    "stoker.batch.explaining.verdict",
    "stoker.batch.finite",
    "stoker.batch.flops",
    "stoker.batch.levers",
    "stoker.batch.estimates.smoothed",
    "stoker.batch.noise",
    "stoker.batch.plan",
    "stoker.batch.scanning.scanned",
    "stoker.batch.reading",
    "stoker.batch.search",
    "stoker.batch.searching.searched",
    "stoker.batch.searching.space",
    "stoker.batch.searching.study",
    "stoker.batch.scope",
    "stoker.batch.swept",
    "stoker.batch.tradeoff",
    "stoker.batch.trainings.history",
    "stoker.batch.trainings.setting",
    "stoker.batch.trainings.trap",
    "stoker.batch.translate",
    "stoker.cli_batch",
    "stoker.record",
    "stoker.report",
    "stoker.signals",
)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_and_functions_stay_short(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_MODULE, f"split {module.name}: more than {LONGEST_MODULE} lines"
    lengths = {
        f"{node.name}:{node.lineno}": (node.end_lineno or 0) - node.lineno + 1 for node in functions(ast.parse(text))
    }
    too_long = {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION}
    assert not too_long, f"split: more than {LONGEST_FUNCTION} lines"


def test_no_import_cycles() -> None:
    """Imports inside functions count too: a lazy import is no way around a cycle."""
    graph = grimp.build_graph("stoker", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as cycle:
        pytest.fail(" -> ".join(cycle.args[1]))


def test_every_package_has_an_init() -> None:
    folders = {path.parent for path in MODULES}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def submodules(name: str) -> list[str]:
    path = getattr(import_module(name), "__path__", None)
    return [name, *(info.name for info in pkgutil.walk_packages(path, f"{name}.") if path)]


@pytest.mark.parametrize("name", TORCH_FREE)
def test_torch_is_not_imported(name: str) -> None:
    """In a process of its own, since the test process has torch already."""
    code = (
        f"import sys, {', '.join(submodules(name))}\n"
        "print([heavy for heavy in ('torch', 'transformers', 'ray', 'wandb', 'pandas') if heavy in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"
