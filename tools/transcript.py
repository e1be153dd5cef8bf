"""A new user's first commands at 80 columns, and what they print: writes docs/transcript.md.

``python -m tools.transcript`` runs the commands on a terminal of its own, in a copy of docs/tutorial.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/transcript.md"
COLUMNS = 80

COMMANDS = (
    "eplb --help",
    "eplb trace info trace.zarr",
    "eplb trace stats trace.zarr --ranks 8",
    "eplb solve --heat trace.zarr --ranks 8 --slots 3 --out map.json",
    "eplb solve --heat trace.zarr --ranks 8 --redundant 8 --out map.json --format sglang",
    "eplb trace synth --out burst.npz --kind bursts",
    "eplb trace synth --out burst.npz --kind bursty --steps 512 --layers 2",
    "eplb slove",
)
"""In this order; mistakes are part of it."""

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?=\n)")
_HEAD = f"""# A first session

What a new user types, mistakes included, and what is printed on a terminal of {COLUMNS} columns, in the folder of the
[tutorial](tutorial.md). Made by `python -m tools.transcript`; tests run the commands again and compare.
"""


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = copied_tutorial(Path(name))
        PAGE.write_text(page([(command, output(command, folder)) for command in COMMANDS]))


def copied_tutorial(folder: Path) -> Path:
    """A folder to run the commands in."""
    shutil.copytree(ROOT / "docs/tutorial", folder / "tutorial")
    return folder / "tutorial"


def page(ran: list[tuple[str, str]]) -> str:
    """Markdown of commands and what they printed."""
    blocks = (f"\n```console\n$ {command}\n{printed}```\n" for command, printed in ran)
    return _HEAD + "".join(blocks)


def output(command: str, folder: Path) -> str:
    """What a command prints on a terminal: stdout and stderr, in order."""
    arguments = [sys.executable, "-m", "eplb_service.cli.main", *shlex.split(command)[1:]]
    environment = {
        **os.environ,
        "COLUMNS": str(COLUMNS),
        "TERM": "dumb",
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
    }
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        arguments, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    printed = b""
    while True:
        try:
            read = os.read(ours, 1 << 16)
        except OSError:  # what Linux says of a terminal that nobody holds any more
            break
        if not read:
            break
        printed += read
    process.wait()
    os.close(ours)
    text = _CONTROL.sub("", printed.decode())
    # Kernels are compiled once per machine; what is said of that is not part of the session.
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("compil")]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    main()
