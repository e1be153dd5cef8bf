"""Run the commands from README, tutorial, files.md and vllm.md in an environment installed as these pages describe.

The pages mark their code blocks. ``sh install`` installs the packages, ``sh`` runs a command, ``sh service`` starts a
service, and ``sh operator`` queries it. ``sh rank`` and ``sh wheel`` need an engine with torch, so the test suite runs
them instead.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from tools.pythons.running import SECONDS, FailedError, clean_environment, run, wait_for

ROOT = Path(__file__).parents[2]
README, INDEX, TUTORIAL, FILES, VLLM = (
    *("README.md", "docs/index.md", "docs/tutorial.md"),
    *("docs/files.md", "docs/vllm.md"),
)
BASH = "/bin/bash"
_RECORDING = """
import numpy as np
np.savez("recording.npz", logical_count=np.random.default_rng(0).integers(1, 99, (64, 4, 32)))
"""


def blocks(page: str, kind: str) -> list[str]:
    """Return the code blocks of one kind on a page, in order."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{re.escape(kind)}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def copy_of_checkout(folder: Path) -> Path:
    """Copy the files that git tracks, and untracked files that it does not ignore, into ``folder/checkout``."""
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            target = folder / "checkout" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    return folder / "checkout"


def install_from(checkout: Path, environment: Path) -> None:
    """Install into a bare environment with the pages' commands, which must be the same on all pages."""
    scripts = {page: blocks(page, "sh install") for page in (README, INDEX, VLLM)}
    (commands,) = {tuple(page_scripts) for page_scripts in scripts.values()}
    (script,) = commands
    shell(script.replace("pip install", "pip install --quiet"), checkout, environment)


def check_documents(checkout: Path, environment: Path) -> list[str]:
    """Run the pages' commands. Raises ``FailedError`` if a command fails."""
    tutorial = blocks(TUTORIAL, "sh")
    shell(f"eplb trace convert docs/tutorial/trace.zarr --out {checkout}/heat.npz", checkout, environment)
    for script in blocks(README, "sh"):
        check_excerpt(shell(script, checkout, environment))
    (example,) = [block for block in blocks(README, "python") if "solve(" in block]
    # Python imports from the script's directory first, so run the script in a directory without the checkout's
    # packages.
    (checkout / "example").mkdir()
    example = f"import numpy\nheat = numpy.load('heat.npz')['heat']\n{example}"
    (checkout / "example/example.py").write_text(example)
    shell("python example/example.py", checkout, environment)
    shell("\n".join(tutorial), checkout, environment)
    # The page reads a recording made by a different program. eplb-service does not ship that recording, so create it.
    run([sys.executable, "-c", _RECORDING], cwd=checkout)
    for script in blocks(FILES, "sh"):
        shell(script, checkout, environment)
    for page in (README, VLLM):
        check_service(page, checkout, environment)
    if not (checkout / "state/eplb/state.sqlite3").is_file():
        raise FailedError(f"{VLLM}: the service did not create its store in the user's state directory")
    check_keys(checkout)
    count = sum(script.count("\n") for script in (*tutorial, *blocks(README, "sh"), *blocks(FILES, "sh")))
    return [f"{count} lines of commands", "two services"]


def check_service(page: str, checkout: Path, environment: Path) -> None:
    """Start the service and query it with a page's commands, on free ports of this host."""
    listen = free_port()
    metrics = free_port()
    (checkout / "state").mkdir(exist_ok=True)
    # Each page creates its own keys.
    shutil.rmtree(checkout / "deploy/secrets", ignore_errors=True)

    def localise(script: str) -> str:
        script = script.replace("eplb.example", "localhost").replace("/var/lib/eplb", "state")
        return script.replace(":50551", f":{listen}").replace(":9464", f":{metrics}")

    (script,) = blocks(page, "sh service")
    # The pages do not name a store, so the service creates one in the user's state directory.
    settings = {"EPLB_METRICS": f"127.0.0.1:{metrics}", "XDG_STATE_HOME": str(checkout / "state")}
    with (checkout / "service.log").open("w") as log:
        # The shell execs the service, so that terminating the shell's process terminates the service.
        last = localise(script).rindex("eplb serve")
        process = subprocess.Popen(
            [BASH, "-ec", localise(script)[:last] + "exec " + localise(script)[last:]],
            cwd=checkout,
            env=shell_environment(environment) | settings,
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(f"127.0.0.1:{listen}", process, checkout / "service.log")
        for query in blocks(page, "sh operator"):
            command = [BASH, "-ec", localise(query)]
            done = subprocess.run(
                command,
                cwd=checkout,
                env=shell_environment(environment),
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            # No rank has joined, so the service must answer with an error that names the deployment.
            if "decode" not in done.stderr or "Traceback" in done.stderr:
                raise FailedError(f"{page}: {query} exited with code {done.returncode}:\n{done.stderr}")
    finally:
        process.terminate()
        process.wait(SECONDS)


def check_keys(checkout: Path) -> None:
    """Check that git ignores the keys and tokens that the pages create. Raises ``FailedError`` otherwise."""
    keys = [path for pattern in ("*.key", "*.token") for path in checkout.rglob(pattern)]
    if not keys:
        raise FailedError("the pages' commands created no keys")
    for key in keys:
        # If git does not ignore a file, it exits with 1 without naming the file, so check files one at a time.
        run(["git", "check-ignore", str(key.relative_to(checkout))], cwd=ROOT)


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shell_environment(environment: Path) -> dict[str, str]:
    """Return environment variables that put a virtual environment's programs first on the path."""
    return clean_environment() | {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}


def check_excerpt(shown: str) -> None:
    """Check that the README shows lines that ``eplb advise`` prints. Raises ``FailedError`` otherwise."""
    if not shown.startswith("Balancing"):
        return
    (excerpt,) = re.findall(
        r"^```\n(Balancing .*?)^```", (ROOT / README).read_text(), re.DOTALL | re.MULTILINE
    )
    for line in excerpt.splitlines():
        if line.removesuffix(" ...") not in shown:
            raise FailedError(f"{README} shows the line {line!r}, but eplb advise prints:\n{shown[:500]}")


def shell(script: str, checkout: Path, environment: Path) -> str:
    """Run a page's script in the checkout's root and return its output. Raises ``FailedError`` if it fails."""
    return run([BASH, "-ec", script], cwd=checkout, environment=shell_environment(environment))
