"""Attempts by strangers, each with its required outcome: rejected, or bounded in cost without harm to honest ranks."""

from __future__ import annotations

from tests.attacks.attempts import floods, seats, silent, values, web, without_rights  # noqa: F401 # each registers its own
from tests.attacks.attempts.registry import ATTEMPTS, Attempt

__all__ = ["ATTEMPTS", "Attempt"]
