"""Attacks by strangers. Each must be rejected, or have a bounded cost and do no harm to honest ranks."""

from __future__ import annotations

from tests.attacks.attempts import floods, seats, silent, values, web, without_rights  # noqa: F401 # registers the attempts
from tests.attacks.attempts.registry import ATTEMPTS, Attempt

__all__ = ["ATTEMPTS", "Attempt"]
