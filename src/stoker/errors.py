"""Errors a tired person understands at night: what is wrong, where, and what to do."""

__all__ = ["CheckpointError", "ConfigError", "DataError", "ModelError", "RewardError", "RunError", "StokerError"]


class StokerError(Exception):
    """Base of every error stoker raises on purpose; the CLI prints its text without a traceback."""


class ConfigError(StokerError):
    """The run file or an override is wrong."""


class DataError(StokerError):
    """A data set or one of its rows can't be used."""


class ModelError(StokerError):
    """A model or tokenizer can't do what the run asks."""


class RewardError(StokerError):
    """A reward function failed or broke its contract."""


class CheckpointError(StokerError):
    """A checkpoint is incomplete, damaged or of another run."""


class RunError(StokerError):
    """A run can't start, go on or end as asked."""
