"""Settings and file replacement for tests of a service with mutual TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.control.server.certificates import Authority

CREDENTIALS = """
- {name: decode-agents, role: agent, deployments: [decode], certificate: decode.agents}
- {name: prefill-agents, role: agent, deployments: [prefill], certificate: prefill.agents}
- {name: on-call, role: operator, deployments: ['*'], certificate: on-call}
"""


def flags(folder: Path, authority: Authority) -> dict[str, Any]:
    (folder / "credentials.yaml").write_text(CREDENTIALS)
    certificate, key = authority.sign("localhost")
    return {
        "listen": "127.0.0.1:0",
        "tls_cert": certificate,
        "tls_key": key,
        "tls_client_ca": authority.ca,
        "credentials": folder / "credentials.yaml",
    }


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file atomically, as a certificate renewal would."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.rename(path)
