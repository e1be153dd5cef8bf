"""Test of each extra: install only this extra on top of the base packages, and use it once."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import tomllib

from tools.pythons.running import install, run

ROOT = Path(__file__).parents[2]

_HEAT = """
import numpy as np
np.savez("{folder}/heat.npz", heat=np.random.default_rng(0).zipf(1.5, (64, 2, 16)).clip(max=99))
"""
_STATISTICS = """
import json, pathlib
import numpy as np
from safetensors.numpy import save_file
folder = pathlib.Path("{folder}/statistics")
folder.mkdir()
(folder / "meta_info.json").write_text(json.dumps(dict(num_experts=4, num_experts_per_token=2)))
save_file({"1_0": np.arange(4)}, folder / "rank0.safetensors")
"""
_TORCH_FILE = """
import numpy as np, torch
torch.save(dict(heat=torch.from_numpy(np.load("{folder}/heat.npz")["heat"])), "{folder}/heat.pt")
"""
_LEASE = """
import json, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from lightkube import Client, KubeConfig
from lightkube.config.models import Cluster, User
from eplb_service.control.server.lease.kubernetes_lease import KubernetesLease

class Api(BaseHTTPRequestHandler):
    def answer(self, code, content):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(404, dict(kind="Status", code=404, reason="NotFound", message="no such lease"))
    def do_POST(self):
        self.answer(201, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
    do_PUT = do_POST
    def log_message(self, *_):
        pass

server = HTTPServer(("127.0.0.1", 0), Api)
threading.Thread(target=server.serve_forever, daemon=True).start()
cluster = Cluster(server="http://127.0.0.1:%d" % server.server_port)
config = KubeConfig.from_one(cluster=cluster, user=User(token="token"), namespace="serving")
lease = KubernetesLease(Client(config, trust_env=False), "eplb", "here", 15)
assert lease.attempt()
"""
_DECISION = """
import numpy as np
from worker_agent.policy.decide import decide
heat = np.tile([2000, 1000, 6000, 1000], (8, 1, 1))
assert decide(heat, [[0, 1, 2, 3, 0, 1]], ranks=2).tolist() == [[0, 1, 2, 3, 0, 2]]
"""
_AGENT_NEEDS = ["pydantic-settings", "xxhash"]
EXTRAS: dict[str, list[str]] = {
    "tables": [
        "eplb trace convert {folder}/heat.npz --out {folder}/heat.parquet",
        "eplb trace info {folder}/heat.parquet",
    ],
    "safetensors": [_STATISTICS, "eplb trace info {folder}/statistics"],
    "torch": [_TORCH_FILE, "eplb trace info {folder}/heat.pt"],
    "ray": [
        "eplb sweep {folder}/heat.npz --ranks 4 --redundant 0 --window 16 --interval 16 --policy none --ray local"
    ],
    "kubernetes": [_LEASE],
    "demo": ["eplb demo --ranks 2 --steps 240"],
    "model": ["import torch, eplb_lab.model.checkpoint"],
    "checkpoint": ["import torch, transformers, eplb_lab.demo.stage"],
    "peers": ["import torch, eplb_lab.bench.peers.balancers"],
    "policy": ["import torch", _DECISION],
}
"""Commands and programs that use each extra. A test compares the list with ``pyproject.toml``."""
_LAB = {"checkpoint", "demo", "model", "peers"}
"""Extras of eplb-lab, which need torch and the eplb-lab and eplb-agent wheels."""
_AGENT = {"policy"}
"""Extras of eplb-agent, which need torch and its wheel."""


def check_extra(extra: str, base: Path, scratch: Path, wheels: dict[str, Path]) -> list[str]:
    """Install one extra in a new environment, use it, and return the requirements that were installed.

    The packages of ``base`` are on the new environment's path, so that only the extra's own packages are installed.
    torch comes from the environment that runs this script, because a download would take gigabytes.
    """
    folder = scratch / f"extra-{extra}"
    python = str(folder / "bin/python")
    run([str(base / "bin/python"), "-m", "venv", "--without-pip", str(folder)])
    (site,) = folder.glob("lib/python*/site-packages")
    shared = [next(base.glob("lib/python*/site-packages"))]
    if extra in _LAB | _AGENT or extra == "torch":
        shared.append(Path(sysconfig.get_paths()["purelib"]))
    (site / "base.pth").write_text("".join(f"{path}\n" for path in shared))
    needs = requirements(extra)
    if extra in _LAB | _AGENT:
        own = ["eplb_agent", *(["eplb_lab"] if extra in _LAB else [])]
        install(folder, "--no-deps", *(str(wheels[name]) for name in own))
        needs = [name for name in needs if not name.startswith("eplb-")] + _AGENT_NEEDS
    install(folder, *needs)
    run([python, "-c", _HEAT.replace("{folder}", str(folder))])
    for use in EXTRAS[extra]:
        text = use.replace("{folder}", str(folder))
        name, *arguments = text.split()
        run([python, "-m", "eplb_service.cli.main", *arguments] if name == "eplb" else [python, "-c", text])
    return [*needs, "used"]


def requirements(extra: str) -> list[str]:
    """Return the requirements of an extra."""
    folder = ROOT
    if extra in _LAB | _AGENT:
        folder = ROOT / "packaging" / ("eplb-lab" if extra in _LAB else "eplb-agent")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extra_requirements: list[str] = project["optional-dependencies"][extra]
    return extra_requirements
