"""What a command raises for a mistake that its user can correct, and the numbers in an option's text."""

from __future__ import annotations


class UserError(Exception):
    """A user's mistake, in one line: what was wrong and how to correct it."""


def whole_numbers(name: str, text: str, least: int = 1) -> list[int]:
    """Each whole number of ``text``, separated by commas, once and in order.

    Raises
    ------
    UserError
        Naming the option where one is none, or less than ``least``.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) >= least for part in parts):
        raise UserError(f"Invalid value for '{name}': {text!r} holds no whole numbers of {least} or more")
    return list(dict.fromkeys(int(part) for part in parts))
