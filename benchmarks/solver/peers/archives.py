"""Fetches the sources of other people's balancers from a package index, without what their packages depend on.

They go into a folder that git ignores; of each archive only the balancers' own files are unpacked.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
import shutil
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

SOURCES = Path(__file__).parent.parent / ".peers"


class PeerError(RuntimeError):
    """A peer that cannot be had or does not answer; the message says why."""


@dataclass(frozen=True)
class Package:
    """One package of the index, and the folder of it that holds balancers."""

    name: str
    version: str
    archive: str
    """What the archive's name begins with."""
    folder: str

    @property
    def root(self) -> Path:
        """Where its files are unpacked."""
        return SOURCES / f"{self.name}-{self.version}"


VLLM_ASCEND = Package(
    "vllm-ascend", "0.23.0.post1", "vllm_ascend-0.23.0.post1.tar.gz", "vllm_ascend/eplb/core/policy/"
)
VLLM = Package("vllm", "0.33.0", "vllm-0.33.0.tar.gz", "vllm/distributed/eplb/policy/")
SGLANG = Package("sglang", "0.5.23", "sglang-0.5.23-", "sglang/srt/eplb/eplb_algorithms/")


def fetch(package: Package, index: str) -> None:
    """Unpack a package's balancers unless they are there; raises ``PeerError`` where the index does not give them."""
    if package.root.exists():
        return
    try:
        data = _download(package, index)
        partial = package.root.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        for name, content in _files(data):
            if name.startswith(package.folder) and name.endswith(".py"):
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        partial.rename(package.root)
    except (OSError, ValueError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise PeerError(f"{package.name} {package.version} could not be fetched ({error})") from error


def _download(package: Package, index: str) -> bytes:
    """The archive, its digest checked against the index's."""
    page = urljoin(index.rstrip("/") + "/", f"{package.name}/")
    with urllib.request.urlopen(page, timeout=60) as answer:
        listing = answer.read().decode()
    links = [html.unescape(link) for link in re.findall(r'href="([^"]+)"', listing)]
    link = next((link for link in links if f"/{package.archive}" in link), None)
    if link is None:
        raise ValueError(f"{page} lists no {package.archive}")
    address, _, digest = urljoin(page, link).partition("#sha256=")
    with urllib.request.urlopen(address, timeout=600) as answer:
        data: bytes = answer.read()
    if digest and hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"{address} is not what its index says")
    return data


def _files(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file of a wheel or source archive; a source archive's own folder is left out."""
    if data.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            for name in wheel.namelist():
                yield name, wheel.read(name)
        return
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name.partition("/")[2], content.read()
