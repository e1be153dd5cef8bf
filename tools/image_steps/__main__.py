"""``python -m tools.image_steps``: every step of the Dockerfile, then a container's life, by chroot and no runtime.

What it cannot show is the base image: in its place is this machine's system, read-only, with this Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.image_steps.build import Build
from tools.image_steps.container import Container
from tools.image_steps.dockerfile import DockerfileError, stages_of
from tools.image_steps.root import StepError

_ROOT = Path(__file__).parents[2]
_NEEDED = ("unshare", "nsenter", "chroot", "mount", "umount", "ip", "useradd")
_INSIDE = "--inside"
_NAMESPACE = ("unshare", "--mount", "--propagation", "private")


def main() -> int:
    """Exit status: 0 where all steps went well, or none could be tried; 1 where one failed."""
    if len(sys.argv) == 3 and sys.argv[1] == _INSIDE:
        return _inside(Path(sys.argv[2]))
    reason = _why_not()
    if reason is not None:
        print(f"image steps SKIPPED: {reason}", flush=True)
        return 0
    # Mounts are made in a namespace that ends with the process in it: the folder that is removed here never had any.
    with tempfile.TemporaryDirectory(prefix="eplb-image-") as folder:
        inside = [sys.executable, "-m", "tools.image_steps", _INSIDE, folder]
        return subprocess.run([*_NAMESPACE, *inside], check=False).returncode


def _inside(folder: Path) -> int:
    try:
        _carry_out(folder)
    except (StepError, DockerfileError) as error:
        print(f"image steps FAILED: {error}", flush=True)
        return 1
    print("image steps: all done", flush=True)
    return 0


def _carry_out(folder: Path) -> None:
    build = Build(_context(folder / "context"), folder, _report)
    stages = stages_of((_ROOT / "Dockerfile").read_text(encoding="utf-8"))
    roots = [build.stage(stage) for stage in stages]
    container = Container(roots[-1], stages[-1], {"EPLB_INSECURE": "true"})
    if "Usage: eplb" not in container.says("--help"):
        raise StepError("the entry point does not print its help")
    print("entry point: prints its help", flush=True)
    with container.serving() as process:
        asked = container.wait_until_healthy(process)
        print(f"health check: content when asked {asked} times", flush=True)
        print(f"stop signal: ended well after {container.stop(process):.1f} s", flush=True)


def _context(folder: Path) -> Path:
    """A copy of what the build context holds, by ``.dockerignore``: everything is left out but what it names."""
    lines = (_ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    left_out = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "*.pyc", "*_pb2*")
    for name in (line[1:] for line in lines if line.startswith("!")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (_ROOT / name).is_dir():
            shutil.copytree(_ROOT / name, folder / name, ignore=left_out)
        else:
            shutil.copy(_ROOT / name, folder / name)
    return folder


def _report(step: str, seconds: float) -> None:
    print(f"{seconds:7.1f} s  {step}", flush=True)


def _why_not() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux, for chroot and mounts"
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"this machine has no {', '.join(missing)}"
    tried = subprocess.run(
        [*_NAMESPACE, "unshare", "--net", "mount", "--bind", "/usr", "/usr"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"namespaces or mounts are not allowed: {tried.stderr.strip()}"


if __name__ == "__main__":
    sys.exit(main())
