"""Refusal of what a reference operator cannot do, instead of a wrong result."""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"reference operator: {message}")
