"""The C interface: names of types, and the structures of numbers.h, decode.cpp and training.cpp, field for field: there
it says what they are.
"""

import ctypes
from typing import Any

import torch

__all__ = [
    "NAMES",
    "Attention",
    "Layer",
    "Mask",
    "Matrix",
    "Norm",
    "Room",
    "Rows",
    "float32",
    "int32",
    "int64",
    "pointer",
]

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""What the compiled functions of a type end in."""
pointer, int64, int32, float32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _all(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class Norm(ctypes.Structure):
    """An RMSNorm."""

    _fields_ = (("weight", pointer), ("eps", float32))


class Rows(ctypes.Structure):
    """The rows of a step."""

    _fields_ = (
        *_all(pointer, "prompts lengths starts"),
        *_all(int64, "rows column heads group dim own_room shared_room"),
        ("threads", int32),
    )


class Attention(ctypes.Structure):
    """One layer's attention."""

    _fields_ = (
        *_all(Norm, "query_norm key_norm"),
        *_all(pointer, "cosines sines own_keys own_values shared_keys shared_values"),
        ("window", int64),
        *_all(float32, "scale softcap"),
    )


class Mask(ctypes.Structure):
    """Of attention scores."""

    _fields_ = (("at", pointer), *_all(int64, "between_blocks between_queries"))


class Matrix(ctypes.Structure):
    """Weights."""

    _fields_ = (*_all(pointer, "weights bias"), *_all(int64, "outputs depth"))


class Layer(ctypes.Structure):
    """All of a layer."""

    _fields_ = (
        ("attention", Attention),
        *_all(Matrix, "query key value output gate up down"),
        *_all(Norm, "after_attention before_mlp after_mlp following"),
        ("gelu", int32),
    )


class Room(ctypes.Structure):
    """Where a step writes."""

    _fields_ = _all(pointer, "x normed query key value seen mixed gate up gated")
