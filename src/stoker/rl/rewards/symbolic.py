"""Child process: are two mathematical answers equal? math-verify (sympy) decides; started on demand.

It runs apart because sympy can take forever or all memory on hostile input, and because math-verify
uses signals. Only LaTeX is parsed, by a grammar: sympy's own `parse_expr` would evaluate text as Python.
"""

import contextlib
import logging
import re
import resource
from collections.abc import Iterator
from typing import Any

from stoker.rl.rewards.wire import serve

__all__: list[str] = []

MEMORY_BYTES = 4 << 30


def _latex(text: str) -> str:
    """Plain notation as LaTeX: sqrt(2), pi, x**2, `1 or 2`."""
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}", text.replace("**", "^"))
    text = re.sub(r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln|exp|infty)(?![A-Za-z])", r"\\\1 ", text)
    return re.sub(r"\s+(?:or|and)\s+", ", ", text)


def equal(reference: str, answer: str) -> bool:
    """True if both parse and are equal. Errors of the parser or sympy mean that equality wasn't shown."""
    from math_verify import LatexExtractionConfig, parse, verify

    settings = [LatexExtractionConfig()]
    gold = parse(f"${_latex(reference)}$", settings, parsing_timeout=None)
    found = parse(f"${_latex(answer)}$", settings, parsing_timeout=None)
    return bool(gold and found and verify(gold, found, timeout_seconds=None))


def _answer(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        yield {"equal": equal(request["reference"], request["answer"])}
    except Exception as error:  # whatever sympy makes of the text: equality wasn't shown
        yield {"equal": False, "error": repr(error)}


if __name__ == "__main__":
    with contextlib.suppress(ValueError):  # macOS knows no such limit; elsewhere a hard limit may be lower already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable(logging.ERROR)
    if not equal("x+1", "1+x"):  # builds the parser before the first deadline runs, and proves it
        raise SystemExit(
            "math-verify finds 1+x unequal to x+1: it, or its ANTLR runtime, is broken; reinstall math-verify"
        )
    serve(_answer)
