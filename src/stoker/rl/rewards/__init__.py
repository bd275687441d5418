"""Rewards: rules, users' functions, and the suite that mixes and audits them. Imports wait until asked for."""

from typing import TYPE_CHECKING

from stoker.lazy import lazy

if TYPE_CHECKING:
    from stoker.rl.rewards.audit import AuditLine
    from stoker.rl.rewards.suite import RewardSuite, build

__all__ = ["AuditLine", "RewardSuite", "build"]

if not TYPE_CHECKING:
    # The child processes in this package must start without pydantic and the rest.
    __getattr__, __dir__ = lazy(__name__, {"AuditLine": "audit", "RewardSuite": "suite", "build": "suite"})
