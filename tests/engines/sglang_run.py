"""SGLang engines as users start them, with the agent as they install it and the shim that SGLang needs on CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.engines.conftest import UNCOMPILED, VllmRun, add_shim, engine_environment, make_agent_site
from tests.engines.environments import SGLANG_0523, python_of
from tests.engines.processes import start_engine

HERE = Path(__file__).parent
_SHIM = """
[sglang.srt.plugins]
eplb_cpu_host = sglang_on_cpu:register
"""
ON_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NCCL_SO_PATH": "/nonexistent.so",
}


def make_sglang_site(folder):
    """As ``make_agent_site``, with the shim for SGLang and stand-ins for what is only built for accelerators."""
    site = make_agent_site(folder)
    shutil.copy(HERE / "sglang_on_cpu.py", site)
    shutil.copy(HERE / "absent_on_cpu.py", site / "sitecustomize.py")
    add_shim(site, "eplb_sglang_on_cpu", _SHIM)
    return site


class SglangRun(VllmRun):
    """One engine process that generates for a number of rounds; arguments as ``VllmRun``."""

    def __init__(self, site, folder, checkpoint, options, **environment):
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self._answers = folder / "engine.log", folder / "answers.json"
        ranks = options.get("engine", {}).get("tp_size", 1)
        threads = "|".join(["0", "1"][:ranks])
        settings = engine_environment(
            site, **ON_CPU, **UNCOMPILED, SGLANG_CPU_OMP_THREADS_BIND=threads, **environment
        )
        command = [python_of(SGLANG_0523), HERE / "generate_sglang.py", checkpoint, self._answers]
        self._process = start_engine([*command, json.dumps(options)], settings, self.log)
