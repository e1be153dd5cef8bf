"""Pictures of the docs, made again by `make screenshots`: page and report in a headless Chromium, commands as SVG."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from eplb_service.cli.operator import layer_table, summary_table
from eplb_service.cli.top import render
from tests.control.server.pictured import documents, messages, pictured

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = (64, 58, 9)
"""Ranks, layers and slots of the deployment that is made up."""
_TRACE = ROOT / "docs" / "tutorial" / "trace.zarr"
_SCHEDULE = ("--ranks", "8", "--heat", str(_TRACE))
_WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main() -> None:
    """Write all pictures; exits with 1 where there is no browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"make screenshots: needs one of {', '.join(BROWSERS)}; on Debian: apt install chromium")
    look = messages(*SIZE)
    status = [summary_table(look.whole), layer_table(look.whole.layers, 8)]
    _terminal("status", "eplb status decode", status)
    _terminal("top", "eplb top decode", [render(look.known, look.whole, look.balance, 80, 24)])
    with pictured(documents(*SIZE)) as url:
        _photograph(browser, url, "page", "1180,1000")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.html")
        _eplb("replay", *_SCHEDULE, "--redundant", "8", "--step-ms", "30", "--report", str(report))
        _photograph(browser, report.as_uri(), "report", "1040,860")
    _terminal("advise", "eplb advise --heat trace.zarr --ranks 8", [Text(_eplb("advise", *_SCHEDULE))])


def _eplb(*arguments: str) -> str:
    command = [sys.executable, "-m", "eplb_service.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def _terminal(name: str, command: str, shown: list[RenderableType]) -> None:
    """Write what a command shows on a terminal of 80 columns; the fonts that rich names would be fetched."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(*shown)
    drawn = console.export_svg(title=command, unique_id=name)
    (PICTURES / f"{name}.svg").write_text(_WEB_FONT.sub("", drawn))


def _photograph(browser: str, url: str, name: str, size: str) -> None:
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={profile}", f"--window-size={size}", "--hide-scrollbars"]
        command += ["--virtual-time-budget=5000", f"--screenshot={PICTURES / name}.png", url]
        subprocess.run(command, capture_output=True, timeout=300, check=True)


if __name__ == "__main__":
    main()
