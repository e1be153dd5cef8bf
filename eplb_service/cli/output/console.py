"""What commands print to people: wrapped to the width of a terminal, in whole lines into a file or a pipe."""

from __future__ import annotations

import sys

from rich.console import Console


def output_console() -> Console:
    """Of stdout, as it is now."""
    return Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
