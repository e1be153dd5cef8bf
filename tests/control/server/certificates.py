"""Certificates for tests, generated with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=300)


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """A certificate authority with its own directory for its files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.ca = folder / "ca.pem"
        key = str(folder / "ca.key")
        subject = f"/CN=authority {folder.name}"
        openssl(
            "req", "-x509", *NEW_KEY, "-days", "2", "-subj", subject, "-keyout", key, "-out", str(self.ca)
        )

    def sign(
        self, name: str, *, expired: bool = False, days: int = 2, ip: str = "127.0.0.1"
    ) -> tuple[Path, Path]:
        """Return the paths of a certificate for ``name``, valid for ``days`` days, and of its key."""
        stem = f"{name}.expired" if expired else name
        key, request, certificate = (self.folder / f"{stem}.{suffix}" for suffix in ("key", "csr", "crt"))
        names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:{ip}")
        openssl("req", *NEW_KEY, *names, "-keyout", str(key), "-out", str(request))
        signer = ("-CA", str(self.ca), "-CAkey", str(self.folder / "ca.key"), "-copy_extensions", "copy")
        valid = ("-days", "-1" if expired else str(days))
        openssl("x509", "-req", "-in", str(request), *signer, *valid, "-out", str(certificate))
        return certificate, key
