"""Functions that format tables, code and text as Markdown."""

from __future__ import annotations

import re


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    r"""Return a Markdown table.

    Examples
    --------
    >>> print(table(("option", "default"), [("--ranks", "8")]), end="")
    | option | default |
    | --- | --- |
    | --ranks | 8 |
    """
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )


def code(text: str) -> str:
    """Return a value as Markdown code. ``required``, ``unset`` and the empty string are returned unchanged."""
    return f"`{text}`" if text and text not in {"required", "unset"} else text


def escaped(text: str) -> str:
    """Escape characters that Markdown would interpret. Text that contains backticks is returned unchanged."""
    return re.sub(r"([<>*_\[\]])", r"\\\1", text) if "`" not in text else text


def plain(text: str) -> str:
    """Join the lines of each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.replace("\f", "").split("\n\n"))
