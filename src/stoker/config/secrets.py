"""Secrets stay out of run files, command lines and traces: they come from the environment only."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["find", "is_secret_name", "redact", "redact_argv"]

_HIDDEN = "***"
_ENDINGS = ("token", "apikey", "secret", "password", "passwd", "accesskey", "privatekey", "secretkey", "credentials")
_VOCABULARY_TOKENS = frozenset(
    f"{name}token" for name in ("bos", "eos", "pad", "unk", "mask", "sep", "cls", "stop", "start", "end", "image")
)
"""Names of tokens of a text, not of an account."""
_LOOKS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"
    r"|\bsk-(?=[\w-]*\d)[\w-]{16,}"
    r"|\bgh[opusr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bxox[abprs]-[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----)?"
    r"|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"""([\w.-]+)(["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s"',;&]+)""")
_MIN_ENVIRONMENT_SECRET = 8
"""Shorter values of the environment occur in ordinary text."""


def is_secret_name(name: str) -> bool:
    """Whether a key or option of this name (`HF_TOKEN`, `api-key`, `dbPassword`) holds a secret."""
    plain = re.sub(r"[^a-z0-9]", "", name.rpartition(".")[2].lower())
    return plain.endswith(_ENDINGS) and plain not in _VOCABULARY_TOKENS


def find(data: Any, path: str = "") -> Iterator[str]:
    """Dotted paths in a nested dict/list whose name or value looks like a secret."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            below = f"{path}.{key}" if path else str(key)
            if isinstance(value, str) and value and is_secret_name(str(key)):
                yield below
            else:
                yield from find(value, below)
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from find(value, f"{path}.{index}")
    elif isinstance(data, str) and _LOOKS.search(data):
        yield path


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`text` with everything that looks like a secret, or is one of the environment's, replaced by ***."""
    for name, value in environment.items():
        if is_secret_name(name) and len(value) >= _MIN_ENVIRONMENT_SECRET:
            text = text.replace(value, _HIDDEN)
    text = _LOOKS.sub(_HIDDEN, text)
    return _ASSIGNMENT.sub(lambda m: m[1] + m[2] + _HIDDEN if is_secret_name(m[1]) else m[0], text)


def redact_argv(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """The command line without secrets, `--api-key VALUE` included."""
    follows_secret_option = [False, *(arg.startswith("-") and is_secret_name(arg.lstrip("-")) for arg in argv)]
    return [
        _HIDDEN if hide else redact(arg, environment)
        for arg, hide in zip(argv, follows_secret_option[:-1], strict=True)
    ]
