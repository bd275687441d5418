"""Where a model's files are: a folder, a Hugging Face name, a GGUF file, stoker itself, or the base of adapters."""

import json
from pathlib import Path

from stoker.dotted import nearest
from stoker.errors import ModelError

__all__ = ["base_of", "locate", "refuse_pickle"]

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def base_of(path: str) -> str | None:
    """Where the base of a folder of adapters is; None: the path is no such folder."""
    settings = Path(path).expanduser() / "adapter_config.json"
    if not settings.is_file() or (settings.parent / "config.json").exists():
        return None
    try:
        base = json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{settings} doesn't say which model its adapters are for ({error!r})") from error
    try:
        locate(str(base))
    except ModelError as error:
        raise ModelError(
            f"{settings} names {base!r} as base_model_name_or_path, which can't be found: bring it back, or write "
            "where it is now into that file"
        ) from error
    return str(base)


def locate(path: str) -> tuple[str, str | None]:
    """(folder or hub name, GGUF file name in it or None). Raises ModelError where there is nothing."""
    if path.startswith("embedded:"):
        from stoker import embedded

        try:
            return str(embedded.folder(path.removeprefix("embedded:"))), None
        except ValueError as error:
            raise ModelError(f"model.path = {path!r}: {error}") from error
    where = Path(path).expanduser()
    if where.suffix == ".gguf":
        if not where.is_file():
            raise ModelError(f"model.path = {path!r}: no such file")
        return str(where.parent), where.name
    if where.is_dir():
        if (where / "config.json").is_file():
            return str(where), None
        found = sorted(where.glob("*.gguf"))
        if len(found) == 1:
            return str(where), found[0].name
        if found:
            raise ModelError(f"model.path = {path!r} holds {len(found)} GGUF files: name one, e.g. {found[0]}")
        raise ModelError(f"model.path = {path!r} has no config.json: point it at a folder written by save_pretrained")
    if where.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelError(f"model.path = {path!r}: no such folder (relative to {Path.cwd()})")
    runs = [] if len(where.parts) == 1 else sorted(file.parent.name for file in where.parent.glob("*/config.toml"))
    if runs:  # a hub isn't asked for runs/nmae
        raise ModelError(f"{path!r}: no such folder in {where.parent}, which holds runs{nearest(where.name, runs)}")
    return path, None


def refuse_pickle(folder: str, path: str) -> None:
    """Raise ModelError where a local folder has no weights but pickled ones, or none at all."""
    where = Path(folder)
    if not where.is_dir() or any(where.glob("*.safetensors")) or any(where.glob("*.gguf")):
        return
    pickled = sorted(file.name for pattern in PICKLES for file in where.glob(pattern))
    if pickled:
        raise ModelError(
            f"model.path = {path!r} has only pickled weights ({pickled[0]}), which can run code. Convert them "
            "where you trust them: AutoModelForCausalLM.from_pretrained(old).save_pretrained(new) writes safetensors"
        )
    raise ModelError(
        f"model.path = {path!r} has a config but no weights: set model.from_scratch = true for random ones"
    )
