"""Run the conformance kit on vLLM's and SGLang's own EPLB, on CPU: ``make conformance``.

``python -m tests.engines.conformance_on_cpu --engine vllm`` runs it on vLLM only. All other arguments are passed to
the kit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from eplb_lab.conformance.__main__ import main as run_kit
from tests.engines.environments import SGLANG_0523, VLLM_032, Engine, python_of

HERE = Path(__file__).parent
ON_CPU = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NCCL_SO_PATH": "/nonexistent.so",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
}
SHIMS: dict[str, tuple[Engine, dict[str, str], str]] = {
    "vllm": (
        VLLM_032,
        {"vllm_on_cpu.py": "vllm_on_cpu.py"},
        "[vllm.general_plugins]\na_cpu_host = vllm_on_cpu:register\nb_own_eplb = own_eplb_on_cpu:register_vllm\n",
    ),
    "sglang": (
        SGLANG_0523,
        {
            "sglang_on_cpu.py": "sglang_on_cpu.py",
            "stand_ins.py": "stand_ins.py",
            "absent_on_cpu.py": "sitecustomize.py",
        },
        "[sglang.srt.plugins]\na_cpu_host = sglang_on_cpu:register\nb_own_eplb = own_eplb_on_cpu:register_sglang\n",
    ),
}
"""Each engine's environment, its shims (each with its name in the plugin folder), and their entry points."""


def make_shims(engine: str, folder: Path) -> Path:
    """Fill a folder for ``--plugin-path`` with the engine's shims for CPU, and return it."""
    _, modules, entry_points = SHIMS[engine]
    for module, name in ({"own_eplb_on_cpu.py": "own_eplb_on_cpu.py"} | modules).items():
        shutil.copy(HERE / module, folder / name)
    metadata = folder / "eplb_shims-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: eplb-shims\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    return folder


def run_on_cpu(engine: str, *arguments: str) -> int:
    """Run the kit on one engine and return its exit status."""
    python = python_of(SHIMS[engine][0])
    for name, value in ON_CPU.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="eplb-shims-") as folder:
        shims = make_shims(engine, Path(folder))
        return run_kit([engine, "--python", str(python), "--plugin-path", str(shims), *arguments])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="All other arguments are passed to python -m eplb_lab.conformance."
    )
    parser.add_argument("--engine", choices=SHIMS, action="append")
    options, kit_arguments = parser.parse_known_args()
    sys.exit(max(run_on_cpu(engine, *kit_arguments) for engine in options.engine or SHIMS))
