"""Find ``prometheus`` and ``promtool``. If they are not installed, download them from Debian once per machine."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SECONDS = 120


def cache() -> Path:
    """Return the directory for downloaded programs."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "eplb-service" / "prometheus"


@functools.cache
def find(name: str) -> str | None:
    """Return the path of a program, or ``None`` if it is neither installed nor downloadable."""
    installed = shutil.which(name)
    if installed is not None:
        return installed
    cached = cache() / "usr/bin" / name
    if not cached.exists():
        _fetch()
    return str(cached) if cached.exists() else None


def _fetch() -> None:
    """Download Debian's package and unpack it into the cache directory without installing it."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = ["apt-get", "download", "--quiet", "prometheus"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_SECONDS)
            for package in Path(folder).glob("prometheus_*.deb"):
                unpacked = Path(folder) / "unpacked"
                command = ["dpkg-deb", "--extract", str(package), str(unpacked)]
                subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
                cache().parent.mkdir(parents=True, exist_ok=True)
                shutil.move(unpacked, cache())
        except (OSError, subprocess.SubprocessError):
            return
