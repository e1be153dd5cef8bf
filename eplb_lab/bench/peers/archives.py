"""Download the peers' balancers from a package index, without their packages' dependencies.

Each archive is downloaded once and checked against its SHA-256 digest. Only the balancers' files are unpacked, into the
user's cache. They are imported without the rest of their inference engine, which is replaced with empty modules.
"""

from __future__ import annotations

import hashlib
import html
import importlib
import io
import os
import re
import shutil
import sys
import tarfile
import time
import types
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin

SOURCES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eplb" / "peers"
"""Cache directory for the balancers."""
INDEX = "https://pypi.org/simple"
"""Default package index."""

_PAGE_SECONDS = 15.0
"""Seconds after which an index page counts as unreachable."""
_ARCHIVE_SECONDS = 180.0
"""Seconds after which an archive counts as unreachable. Archives are up to 100 MB."""
_CHUNK = 1 << 16


class PeerError(RuntimeError):
    """Raised if a peer cannot be fetched. The message gives the reason."""


class IndexUnreachableError(PeerError):
    """Raised if the package index does not respond in time. Requests for other packages would then fail as well."""


@dataclass(frozen=True)
class Package:
    """Package on the index that contains balancers.

    Parameters
    ----------
    name
        Name on the index.
    version
        Version to fetch.
    archive
        File name of the wheel or source archive.
    folder
        Path of the balancers' directory within the archive, ending in a slash.
    sha256
        Hexadecimal digest of the archive.
    """

    name: str
    version: str
    archive: str
    folder: str
    sha256: str

    @property
    def root(self) -> Path:
        """Cache directory for this version."""
        return SOURCES / f"{self.name}-{self.version}"


VLLM_ASCEND = Package(
    "vllm-ascend",
    "0.23.0.post1",
    "vllm_ascend-0.23.0.post1.tar.gz",
    "vllm_ascend/eplb/core/policy/",
    "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1",
)
VLLM_ASCEND_NEXT = Package(
    "vllm-ascend",
    "0.30.0rc2",
    "vllm_ascend-0.30.0rc2.tar.gz",
    "vllm_ascend/distributed/eplb/policy/",
    "05cb51448c0cd174ea338b16ebbfc8e215f44b373ea2a0d65f1314523a01152f",
)
VLLM = Package(
    "vllm",
    "0.33.0",
    "vllm-0.33.0.tar.gz",
    "vllm/distributed/eplb/policy/",
    "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
)
SGLANG = Package(
    "sglang",
    "0.5.23",
    "sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl",  # its balancers are pure Python
    "sglang/srt/eplb/eplb_algorithms/",
    "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
)


def fetch(package: Package, index: str) -> None:
    """Fetch and unpack a package's balancers unless they are cached.

    Raises ``PeerError`` if they cannot be fetched, or if they are not cached and ``index`` is empty.
    """
    if package.root.exists():
        return
    if not index:
        raise PeerError(f"{package.name} {package.version} is not in {SOURCES}, and fetching is disabled")
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
    except (OSError, HTTPException, ValueError, tarfile.TarError, zipfile.BadZipFile) as error:
        unreachable = isinstance(error, (TimeoutError, URLError)) and not isinstance(error, HTTPError)
        kind = IndexUnreachableError if unreachable else PeerError
        raise kind(f"{package.name} {package.version} could not be fetched ({error})") from error


def import_from(package: Package, module: str) -> types.ModuleType:
    """Import a module by its full name from a package's cached balancers, with empty parent packages."""
    parents = package.folder.strip("/").split("/")
    for depth in range(1, len(parents) + 1):
        name = ".".join(parents[:depth])
        if name not in sys.modules:
            stand_in(name, {"__path__": [str(package.root.joinpath(*parents[:depth]))]})
    return importlib.import_module(f"{'.'.join(parents)}.{module}")


def stand_in(name: str, contents: Mapping[str, Any]) -> None:
    """Register a module with the given contents in ``sys.modules``, along with empty modules for missing parents."""
    parent, _, _ = name.rpartition(".")
    if parent and parent not in sys.modules:
        stand_in(parent, {"__path__": []})
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module


def _download(package: Package, index: str) -> bytes:
    """Download the archive. Raises ``ValueError`` if the index does not list it or its digest is wrong."""
    page = urljoin(index.rstrip("/") + "/", f"{package.name}/")
    links = [
        html.unescape(link) for link in re.findall(r'href="([^"]+)"', _read(page, _PAGE_SECONDS).decode())
    ]
    link = next((link for link in links if f"/{package.archive}" in link), None)
    if link is None:
        raise ValueError(f"{page} does not list {package.archive}")
    data = _read(urljoin(page, link), _ARCHIVE_SECONDS)
    if hashlib.sha256(data).hexdigest() != package.sha256:
        raise ValueError(f"{link} does not have the expected SHA-256 digest {package.sha256}")
    return data


def _read(address: str, seconds: float) -> bytes:
    """Download a page or archive from an index.

    Raises ``ValueError`` if the address is not HTTP or HTTPS, and ``TimeoutError`` if the download takes more than
    ``seconds``.
    """
    if not address.startswith(("https://", "http://")):
        raise ValueError(f"{address} is not an http or https address")
    deadline = time.monotonic() + seconds
    data = bytearray()
    with urllib.request.urlopen(address, timeout=min(seconds, _PAGE_SECONDS)) as response:  # noqa: S310
        while chunk := response.read1(_CHUNK):
            data += chunk
            if time.monotonic() > deadline:
                raise TimeoutError(f"downloading {address} took more than {seconds:g} s")
    return bytes(data)


def _files(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each file of a wheel or source archive.

    Paths in a source archive omit its top-level directory.
    """
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
