"""Download the engines' sources from their source distributions or wheels.

The engines are neither installed nor run, because installing many of them requires an accelerator's toolkit.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

CACHE = Path(
    os.environ.get("TEST_ENGINES")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eplb-service" / "engines"
)
VLLM_ASCEND_023 = "0.23.0.post1"
VLLM_ASCEND_030 = "0.30.0rc2"
VERSIONS = {
    "vllm": tuple(f"0.{minor}.0" for minor in range(23, 34)),
    "vllm_ascend": (VLLM_ASCEND_023, VLLM_ASCEND_030),
    "sglang": ("0.5.21", "0.5.22", "0.5.23"),
}
"""Supported versions of each engine's package, oldest first."""
WHEELS_ONLY = ("sglang",)
"""Packages without a source distribution. Their wheels contain the Python source."""

_FETCH = """
import sys
from pip._internal.commands import create_command
# `pip download` would build the package's metadata, which takes minutes and needs the accelerator's toolkit.
command = create_command("download")
package, form = sys.argv[1:3]
options, _ = command.parse_args(["--no-deps", form, ":all:", "--pre", package])
with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options=options, session=session)
    candidates = finder.find_all_candidates(package)
    if len(sys.argv) == 3:
        print(max(candidate.version for candidate in candidates if not candidate.version.is_prerelease))
    else:
        release = [candidate for candidate in candidates if str(candidate.version) == sys.argv[3]][0]
        open(sys.argv[4], "wb").write(session.get(release.link.url_without_fragment).content)
"""


class SourceUnavailableError(RuntimeError):
    """Raised if a package's source cannot be downloaded, because the index is unreachable or does not have it."""


def newest(package: str) -> str:
    """Return the newest release on the package index, ignoring pre-releases."""
    return _pip(package, package, _form(package))


def source_of(package: str, release: str) -> Path:
    """Return the directory that contains the package's directory. The source is downloaded once per machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    name = f"{package.replace('_', '-')}-{release}"
    if package in ("vllm", *WHEELS_ONLY):  # the name without a suffix belongs to the installed engine
        name += "-source"
    folder = CACHE / name
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _unpack(package, release, folder)
    return folder


def _unpack(package: str, release: str, folder: Path) -> None:
    archive = folder.with_name(f"{folder.name}.archive")
    unpacked = folder.with_name(f"{folder.name}.new")
    _pip(f"{package} {release}", package, _form(package), release, str(archive))
    shutil.rmtree(unpacked, ignore_errors=True)
    if package in WHEELS_ONLY:
        with zipfile.ZipFile(archive) as wheel:
            python = [name for name in wheel.namelist() if name.endswith(".py")]
            wheel.extractall(unpacked, python)  # noqa: S202  (zipfile keeps names within the directory)
    else:
        with tarfile.open(archive) as sources:
            sources.extractall(unpacked, filter="data")
        (root,) = unpacked.iterdir()
        shutil.move(root / package, unpacked / package)
        shutil.rmtree(root)
    archive.unlink()
    unpacked.rename(folder)


def _form(package: str) -> str:
    """Return the pip option that selects wheels or source distributions."""
    return "--only-binary" if package in WHEELS_ONLY else "--no-binary"


def _pip(requirement: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _FETCH, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SourceUnavailableError(f"cannot download {requirement}: {done.stderr[-800:]}")
    return done.stdout.strip()
