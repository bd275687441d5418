"""Rewards: rules, users' functions, and the suite that mixes and audits them. Imports wait until asked for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.rl.rewards.audit import AuditLine
    from stoker.rl.rewards.suite import RewardSuite, build

__all__ = ["AuditLine", "RewardSuite", "build"]


def __getattr__(name: str) -> Any:
    # Lazy, so that the child processes in this package start without pydantic and the rest.
    if name == "AuditLine":
        from stoker.rl.rewards.audit import AuditLine

        return AuditLine
    if name in ("RewardSuite", "build"):
        from stoker.rl.rewards import suite

        return getattr(suite, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
