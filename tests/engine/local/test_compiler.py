"""The decoder's compiled functions: how they come to be, what happens where they can't, and the way off."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from stoker.engine.local import compiler
from stoker.engine.local.compiler import Library, load_library
from stoker.engine.local.products import CompiledProduct, together
from stoker.engine.local.sampler import LocalSampler
from stoker.rl.types import Prompt, Request, SamplingParams

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, compiler._COMPILERS)), reason="no C++ compiler")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library.cache_clear()
    yield tmp_path / "cache" / "stoker"
    load_library.cache_clear()


@needs_compiler
def test_compiles_once_and_says_what_it_cost(fresh: Path, tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    first = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=2)
    assert len(first.notes) == 1 and "compiled functions for this processor in" in first.notes[0]
    (kept,) = fresh.iterdir()
    assert kept.suffix == ".so"
    load_library.cache_clear()
    again = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=2)
    assert again.notes == [] and list(fresh.iterdir()) == [kept]
    assert again.arithmetic == first.arithmetic and again.arithmetic.startswith("compiled by")


def test_without_a_compiler_operators_serve_and_it_is_said(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=2)
    assert len(sampler.notes) == 1 and "no C++ compiler was found" in sampler.notes[0]
    assert sampler.arithmetic == "PyTorch's operators"
    sampler.submit([Request(Prompt("p:0", (1, 2), "", None), 0, SamplingParams(max_new_tokens=3), 0)])
    assert len(list(sampler.collect())) == 1


@needs_compiler
def test_a_compiler_that_fails_is_said_with_its_words(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho "no such option" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert load_library() == "broken++ failed: no such option"
    assert list(fresh.iterdir()) == []


def test_a_compiler_that_does_nothing_is_said(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "silent++"
    silent.write_text("#!/bin/sh\nexit 0\n")
    silent.chmod(0o755)
    monkeypatch.setenv("CXX", str(silent))
    assert load_library() == "silent++ ended without an error and without a library"
    assert list(fresh.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_damaged_library_is_compiled_again(fresh: Path, damage: str) -> None:
    """One cut behind its headers would be opened, and end the process at the first look at what is missing."""
    with pytest.MonkeyPatch.context() as usual:
        usual.delenv("XDG_CACHE_HOME")
        before = load_library()
        kept = compiler._folder()
    assert isinstance(before, Library)
    damaged = fresh / compiler._name(before.compiler)
    damaged.parent.mkdir(mode=0o700, parents=True)
    damaged.write_bytes((kept / damaged.name).read_bytes()[: 4096 if damage == "cut" else 0])
    load_library.cache_clear()
    after = load_library()
    assert isinstance(after, Library) and after.seconds > 0 and after.tiles == before.tiles
    assert list(fresh.iterdir()) == [damaged] and damaged.stat().st_size > 4096


@needs_compiler
def test_without_a_place_to_keep_it_the_way_out_is_said(
    tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert str(load_library()).startswith(f"they can't be kept in {fresh} (")
    load_library.cache_clear()

    def homeless(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert "no home folder" in str(load_library()) and "XDG_CACHE_HOME" in str(load_library())


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX permissions")
@needs_compiler
def test_a_folder_that_others_may_write_to_is_refused(fresh: Path) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    assert "others may write to it" in str(load_library())


def test_the_way_off(tiny_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    sampler = LocalSampler(tiny_llama, tiny_tokenizer, concurrent_samples=2, compiled=False)
    assert sampler.notes == [] and sampler.arithmetic == "PyTorch's operators"


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 64, 65, 600])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_products_in_tiles_are_the_plain_ones(rows: int, bias: bool) -> None:
    library = load_library()
    if not isinstance(library, Library) or not library.tiles:
        pytest.skip("no matrix tiles here")
    generator = torch.Generator().manual_seed(rows)
    modules = [torch.nn.Linear(96, width, bias=bias).bfloat16() for width in (64, 40, 7)]
    x = torch.randn(rows, 200, generator=generator).bfloat16()[:, 50:146]  # rows apart
    product = together(modules, library, pack=True)
    assert isinstance(product, CompiledProduct) and product.kind == "tiles"
    for found, module in zip(product(x), modules, strict=True):
        exact = x.double() @ module.weight.double().T + (module.bias.double() if bias else 0)
        assert found.shape == exact.shape
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)  # rounded once


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 64, 65, 129])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_products_by_rows_are_the_plain_ones(rows: int, bias: bool, dtype: torch.dtype) -> None:
    library = load_library()
    if not isinstance(library, Library) or not library.dots:
        pytest.skip("no registers of 16 floats here")
    generator = torch.Generator().manual_seed(rows)
    modules = [torch.nn.Linear(96, width, bias=bias).to(dtype) for width in (64, 40, 4)]
    x = torch.randn(rows, 200, generator=generator).to(dtype)[:, 50:146]  # rows apart
    product = together(modules, library, pack=False)
    assert isinstance(product, CompiledProduct) and product.kind.startswith("rows")
    for found, alone, module in zip(product(x), product(x[-1:]), modules, strict=True):
        exact = x.double() @ module.weight.double().T + (module.bias.double() if bias else 0)
        assert found.shape == exact.shape
        rounded = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-4}
        torch.testing.assert_close(found.double(), exact, **rounded)
        if rows <= 64:
            assert torch.equal(found[-1:], alone)  # whatever it is beside


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((20, 8), torch.float32), ((32, 6), torch.float32), ((48, 8), torch.bfloat16)]
)
def test_widths_that_registers_do_not_divide_are_left_to_the_operators(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    library = load_library()
    product = together(
        [torch.nn.Linear(*sizes, dtype=dtype)], library if isinstance(library, Library) else None, pack=False
    )
    assert not isinstance(product, CompiledProduct)
