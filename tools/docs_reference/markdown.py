"""Tables, and text of programs between Markdown."""

from __future__ import annotations

import re


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table with these columns."""
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )


def code(text: str) -> str:
    """A value as code; text for its absence as it is."""
    return f"`{text}`" if text and text not in {"required", "unset"} else text


def escaped(text: str) -> str:
    """Text of a program, safe between Markdown."""
    return re.sub(r"([<>*_\[\]])", r"\\\1", text) if "`" not in text else text


def plain(text: str) -> str:
    """One line for each paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\f", "").split("\n\n"))
