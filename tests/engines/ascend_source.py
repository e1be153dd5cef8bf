"""vLLM-Ascend as its source distribution has it: it can only be installed where CANN is, and needs not be to be run."""

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
options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "--pre", "vllm_ascend"])
with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options=options, session=session)
    (found,) = [one for one in finder.find_all_candidates("vllm_ascend") if str(one.version) == sys.argv[1]]
    open(sys.argv[2], "wb").write(session.get(found.link.url_without_fragment).content)
"""


def source_of(release: str) -> Path:
    """The folder that holds the package ``vllm_ascend``; downloaded once per machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / f"vllm-ascend-{release}"
    with (CACHE / f"vllm-ascend-{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _unpack(release, folder)
    return folder


def _unpack(release: str, folder: Path) -> None:
    archive, unpacked = folder.with_name(f"{folder.name}.tar.gz"), folder.with_name(f"{folder.name}.new")
    done = subprocess.run(
        [sys.executable, "-c", _FETCH, release, str(archive)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"vLLM-Ascend {release} CANNOT BE HAD HERE, so it is not tested: {done.stderr[-800:]}")
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as sources:
        sources.extractall(unpacked, filter="data")
    archive.unlink()
    (root,) = unpacked.iterdir()
    shutil.move(root / "vllm_ascend", unpacked / "vllm_ascend")
    shutil.rmtree(root)
    unpacked.rename(folder)
