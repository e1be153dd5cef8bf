"""Addresses, as agents, operators and the service name them."""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` is reached from this host alone; a name other than ``localhost`` counts as anywhere."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
