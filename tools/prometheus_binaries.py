"""Finds ``prometheus`` and ``promtool``, fetched once per machine from Debian where they are not installed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SECONDS = 120


def cache() -> Path:
    """Where what was fetched is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "eplb-service" / "prometheus"


@functools.cache
def find(name: str) -> str | None:
    """Path of the program ``name``; ``None`` where it is not here and cannot be fetched."""
    installed = shutil.which(name)
    if installed is not None:
        return installed
    kept = cache() / "usr/bin" / name
    if not kept.exists():
        _fetch()
    return str(kept) if kept.exists() else None


def _fetch() -> None:
    """Download Debian's package and unpack it beside everything else; nothing is installed."""
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
