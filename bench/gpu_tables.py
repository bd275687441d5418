"""The GPU bench on paper: published rows, model sizes, and the tables."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["QWEN3", "data_sheet_flops", "markdown", "published_rows"]

PUBLISHED = Path(__file__).parent / "data" / "prime_rl.csv"
QWEN3: Mapping[str, Mapping[str, int]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Shapes of the published models; all have 8 key-value heads of 128 and a head tied to 151,936 embeddings."""
DATA_SHEET = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}
"""FLOP/s of dense bf16 products, by what the device's name holds; the first that fits counts."""

Column = tuple[str, str, Callable[[Any], str]]
CHECKS: tuple[Column, ...] = (
    ("check", "check", str),
    ("found", "found", lambda v: f"{v:.2g}"),
    ("bound", "bound", lambda v: f"{v:g}"),
    ("right", "right", lambda v: "yes" if v else "NO"),
)
SAMPLING: tuple[Column, ...] = (
    ("model", "model", str),
    ("sequences", "sequences", str),
    ("new tokens", "new_tokens", str),
    ("tokens/s", "tokens_per_s", lambda v: f"{v:,.0f}"),
    ("share of roofline", "share_of_roofline", lambda v: f"{v:.1%}"),
    ("peak GiB", "peak_gib", lambda v: f"{v:.1f}"),
    ("note", "note", str),
)
UPDATES: tuple[Column, ...] = (
    ("model", "model", str),
    ("device", "device", str),
    ("recompute", "recompute", lambda v: "yes" if v else "no"),
    ("tokens", "tokens", lambda v: f"{v:,}"),
    ("tokens/s", "tokens_per_s", lambda v: f"{v:,.0f}"),
    ("MFU of the measured peak", "mfu", lambda v: f"{v:.1%}"),
    ("MFU of the data sheet", "mfu_of_data_sheet", lambda v: f"{v:.1%}"),
    ("peak GiB", "peak_gib", lambda v: f"{v:.1f}"),
    ("note", "note", str),
)


def data_sheet_flops(device: str) -> float | None:
    """Of a device by its name; None where its data sheet isn't in the list."""
    return next((flops for name, flops in DATA_SHEET.items() if name in device), None)


def published_rows() -> list[dict[str, Any]]:
    """prime-rl's, as rows of the update table."""
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [
        {
            "model": f"{row['model']} (prime-rl, {row['id']})",
            "device": f"{row['devices']} x {row['device']}",
            "recompute": True,
            "tokens": int(row["tokens"]),
            "tokens_per_s": float(row["tokens_per_s"]),
            "mfu_of_data_sheet": float(row["mfu_percent"]) / 100,
            "peak_gib": float(row["peak_gib"]),
            "note": row["note"],
        }
        for row in rows
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """What docs/profiling.md shows of one device."""
    parts = [
        f"### {result['device']}",
        f"{result['date']}, torch {result['torch']}, {result['dtype']}; measured here: matmul "
        f"{result['peak_flops'] / 1e12:.1f} TFLOP/s, copy {result['bandwidth'] / 1e9:.0f} GB/s.",
        "Against the CPU, in float32:",
        table(CHECKS, result["correctness"]),
        "Sampling:",
        table(SAMPLING, result["sampling"]),
        "One update (forward, backward, AdamW step with fp32 master), random weights; prime-rl's rows as published:",
        table(UPDATES, [*result["updates"], *published_rows()]),
        f"The whole took {result['seconds']:.0f} s.",
    ]
    return "\n\n".join(parts) + "\n"


def table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """In markdown; a cell is empty where a row lacks its value."""
    titles = [title for title, _, _ in columns]
    cells = [["" if row.get(key) is None else form(row[key]) for _, key, form in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [titles, ["---"] * len(titles), *cells])
