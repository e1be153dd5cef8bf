"""What strangers try, each with what must come of it: refused, or bounded, and never at honest ranks' cost."""

from __future__ import annotations

from tests.attacks.attempts import floods, seats, silent, values, web, without_rights  # noqa: F401 # each lists its own
from tests.attacks.attempts.registry import ATTEMPTS, Attempt

__all__ = ["ATTEMPTS", "Attempt"]
