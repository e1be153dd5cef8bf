"""Engines as their source distributions have them: many can only be installed where an accelerator's toolkit is."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.engines.environments import CACHE

VLLM_ASCEND_023 = "0.23.0.post1"

_FETCH = """
import sys
from pip._internal.commands import create_command
# `pip download` would build the package's metadata, for minutes and with a toolkit that is not here.
command = create_command("download")
options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "--pre", sys.argv[1]])
with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options=options, session=session)
    candidates = finder.find_all_candidates(sys.argv[1])
    if len(sys.argv) == 2:
        print(max(one.version for one in candidates if not one.version.is_prerelease))
    else:
        (found,) = [one for one in candidates if str(one.version) == sys.argv[2]]
        open(sys.argv[3], "wb").write(session.get(found.link.url_without_fragment).content)
"""


def newest(package: str) -> str:
    """The newest release on the package index that is no release candidate."""
    return _pip(package, package)


def source_of(package: str, release: str) -> Path:
    """A folder that holds the package's folder; downloaded once per machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    name = f"{package.replace('_', '-')}-{release}" if package != "vllm" else f"vllm-{release}-source"
    folder = CACHE / name
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _unpack(package, release, folder)
    return folder


def _unpack(package: str, release: str, folder: Path) -> None:
    archive, unpacked = folder.with_name(f"{folder.name}.tar.gz"), folder.with_name(f"{folder.name}.new")
    _pip(f"{package} {release}", package, release, str(archive))
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as sources:
        sources.extractall(unpacked, filter="data")
    archive.unlink()
    (root,) = unpacked.iterdir()
    shutil.move(root / package, unpacked / package)
    shutil.rmtree(root)
    unpacked.rename(folder)


def _pip(what: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _FETCH, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"{what} CANNOT BE HAD HERE, so it is not tested: {done.stderr[-800:]}")
    return done.stdout.strip()
