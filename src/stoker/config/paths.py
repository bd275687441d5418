"""Files that a run file names, looked for before anything loads; no torch, no network."""

from pathlib import Path

from stoker.config.schema import RunConfig
from stoker.config.task import DATA_SUFFIXES

__all__ = ["missing_files"]


def missing_files(config: RunConfig) -> list[str]:
    """A sentence for each local file or folder that a key names and that isn't there.

    Names that may be of a hub or of an installed package are not judged.
    """
    named = {f"task.sources.{n}.path": source.path for n, source in enumerate(config.task.sources)}
    named |= {f"validation.sets.{n}.path": source.path for n, source in enumerate(config.validation.sets)}
    named |= {f"rewards.{n}.function": reward.function for n, reward in enumerate(config.rewards)}
    named |= {"algorithm.advantage": config.algorithm.advantage, "algorithm.loss": config.algorithm.loss}
    models = {"model.path": config.model.path, "reference.path": config.reference.path, "start_from": config.start_from}
    named |= {key: path for key, path in models.items() if path}
    return [
        f"{key} = {path!r}: there is no {file} (looked in {Path.cwd()})"
        for key, path in named.items()
        if (file := _local(path)) is not None and not file.expanduser().exists()
    ]


def _local(path: str) -> Path | None:
    """The file or folder that it can only mean; None where it may be something else."""
    file = Path(path.partition(".py:")[0] + ".py") if ".py:" in path else Path(path)
    explicit = path.startswith(("/", "./", "../", "~"))
    return file if explicit or file.suffix in (".py", ".gguf", *DATA_SUFFIXES) else None
