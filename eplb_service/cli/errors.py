"""The one exception that a command raises for what its user can mend."""

from __future__ import annotations


class UserError(Exception):
    """A user's mistake, told in one line that says what was wrong and how to mend it."""
