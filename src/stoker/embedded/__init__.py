"""Small things that ship with stoker, so that a first run needs no download."""

from pathlib import Path

__all__ = ["folder"]


def folder(name: str = "tiny") -> Path:
    """Folder of an embedded model, as a model path for transformers. Raises ValueError with the known names."""
    root = Path(__file__).parent
    known = sorted(found.parent.name for found in root.glob("*/config.json"))
    if name not in known:
        raise ValueError(f"no embedded model '{name}'; there is {', '.join(known)}")
    return root / name
