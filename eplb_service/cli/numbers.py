"""Numbers in an option's text: several with commas between."""

from __future__ import annotations

from eplb_service.cli.errors import UserError


def whole_numbers(name: str, text: str, least: int = 1) -> list[int]:
    """Each whole number of ``text`` once, in order; raises ``UserError`` naming the option where it is none."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) >= least for part in parts):
        raise UserError(f"Invalid value for '{name}': {text!r} holds no whole numbers of {least} or more")
    return list(dict.fromkeys(int(part) for part in parts))
