"""Write the docs' images: ``make screenshots``.

A headless Chromium captures the web page and the report. Command output is rendered as SVG. The web page, ``eplb
status``, ``eplb top`` and the demo's chart come from one run of ``eplb demo`` on this machine.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
from rich.console import Console, RenderableType
from rich.text import Text

from eplb_core.wire.generated import operator_pb2, operator_pb2_grpc
from eplb_service.cli.operator import layer_table, summary_table
from eplb_service.cli.top import render

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STEPS = 480
"""Number of steps in the demo run."""
_LOOK_AT = 0.9
"""Fraction of the run after which the web page, ``eplb status`` and ``eplb top`` are captured."""
_TRACE = ROOT / "docs" / "tutorial" / "trace.zarr"
_SCHEDULE = ("--ranks", "8", "--heat", str(_TRACE))
_WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main() -> None:
    """Write the named pictures, by default all. Exit with 1 if a picture needs a browser but none is found."""
    parser = argparse.ArgumentParser(prog="python -m tools.screenshots", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"pictures to write: {', '.join(PARTS)} (default: all)")
    named = parser.parse_args().parts
    if set(named) - PARTS.keys():
        parser.error(f"unknown picture; choose from {', '.join(PARTS)}")
    for part in named or PARTS:
        PARTS[part]()


def _picture_report() -> None:
    browser = _browser()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.html")
        _eplb("replay", *_SCHEDULE, "--redundant", "8", "--step-ms", "30", "--report", str(report))
        _photograph(browser, report.as_uri(), "report", "1040,860")


def _picture_advice() -> None:
    _terminal("advise", "eplb advise --heat trace.zarr --ranks 8", [Text(_eplb("advise", *_SCHEDULE))])


def _browser() -> str:
    """Return the path of a browser. Exit with 1 if none is found."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(
            f"make screenshots: found none of {', '.join(BROWSERS)}; on Debian, run `apt install chromium`"
        )
    return browser


def _picture_demo() -> None:
    """Run the demo, capture it while it serves, and write its chart at the end."""
    browser = _browser()
    command = [sys.executable, "-m", "eplb_service.cli.main", "demo", "--steps", str(STEPS)]
    command += ["--picture", str(PICTURES.parent / "demo.svg")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as demo:
        shown = ""
        pictured = False
        for line in demo.stdout or ():
            shown += line
            step = re.match(r"step (\d+)/", line)
            if step is None or pictured or int(step[1]) < _LOOK_AT * STEPS:
                continue
            pictured = True
            addresses = re.search(r"service at (\S+), web page at (\S+?)[\s;]", shown)
            assert addresses is not None
            _picture_service(addresses[1])
            _photograph(browser, addresses[2], "page", "1180,1240")
    if demo.returncode != 0 or not pictured:
        sys.exit(f"the demo failed:\n{shown}")


def _picture_service(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        deployments = list(stub.ListDeployments(operator_pb2.ListDeploymentsRequest()).deployments)
        status = stub.GetStatus(operator_pb2.GetStatusRequest(deployment="demo"))
        balance = stub.GetBalance(operator_pb2.GetBalanceRequest(deployment="demo"))
    _terminal("status", "eplb status demo", [summary_table(status), layer_table(status.layers, 8)])
    _terminal("top", "eplb top demo", [render(deployments, status, balance, 100, 32)], width=100)


def _eplb(*arguments: str) -> str:
    command = [sys.executable, "-m", "eplb_service.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def _terminal(name: str, command: str, shown: list[RenderableType], width: int = 80) -> None:
    """Write a command's output as SVG, ``width`` columns wide, without the web fonts that rich would link to."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(*shown)
    drawn = console.export_svg(title=command, unique_id=name)
    (PICTURES / f"{name}.svg").write_text(_WEB_FONT.sub("", drawn))


def _photograph(browser: str, url: str, name: str, size: str) -> None:
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={profile}", f"--window-size={size}", "--hide-scrollbars"]
        command += ["--virtual-time-budget=5000", f"--screenshot={PICTURES / name}.png", url]
        subprocess.run(command, capture_output=True, timeout=300, check=True)


PARTS = {"demo": _picture_demo, "report": _picture_report, "advise": _picture_advice}
"""Functions that write the pictures, by name. ``advise`` needs no browser."""


if __name__ == "__main__":
    main()
