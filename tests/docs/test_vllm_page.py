"""The vLLM page is complete: its commands run verbatim against a service with TLS and tokens."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.service import free_address

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text()


def block(kind):
    (text,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    return text


@pytest.fixture
def shell(tmp_path):
    """Run the page's commands in one directory, with localhost and a free port as the service's address."""
    address = free_address()
    port = address.rpartition(":")[2]
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    commands = str(Path(sys.executable).parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EPLB_")}
    environment |= {"PATH": f"{commands}:{environment['PATH']}", "EPLB_METRICS": free_address()}
    environment["EPLB_STORE"] = str(tmp_path / "state.sqlite3")

    def start(kind):
        script = block(kind).replace("eplb.example:50551", f"localhost:{port}").replace(":50551", f":{port}")
        with (tmp_path / f"{kind[3:]}.log").open("w") as log:
            command = ["bash", "-ec", script]
            return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)

    def run(kind):
        status = start(kind).wait(300)
        return status, (tmp_path / f"{kind[3:]}.log").read_text()

    return start, run


def test_the_pages_service_doctor_and_operator_commands_work(shell):
    start, run = shell
    service = start("sh service")
    try:
        while True:
            output = run("sh operator")[1].lower().replace(" ", "_")
            if "not_found" in output or "no_deployment" in output:
                break
            assert service.poll() is None, "the service has exited"
            time.sleep(1)
        status, findings = run("sh rank")
    finally:
        service.terminate()
        service.wait(60)
    assert status == 0, findings
    assert re.search(r"^ok +service +localhost:\d+ responds$", findings, re.MULTILINE)
    assert re.search(r"^ok +expert round trip ", findings, re.MULTILINE)
    assert "FAILED" not in findings


def test_the_log_excerpt_matches_the_agents_messages():
    sources = "".join(path.read_text() for path in (ROOT / "worker_agent").rglob("*.py"))
    sources = re.sub(r'"\n +"', "", sources)  # join the parts of long messages
    lines = block("text log").splitlines()
    assert len(lines) == 5
    for line in lines:
        fixed = re.sub(r"\d+(?:\.\d+)?|\bdecode\b|eplb\.example:0*\S*|\.\.\.", "\0", line)
        pattern = r"%[ds]".join(re.escape(text) for text in re.split("\0+", fixed))
        assert re.search(pattern, sources), line
