"""Invalid agent settings are rejected before a rank connects to its peers."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from worker_agent.settings import AgentSettings


@pytest.mark.parametrize(
    ("data_host", "reason"),
    [
        ("", "without a port, got ''"),
        ("10.0.0.7:29500", "expected a host name or an IP address without a port, got '10.0.0.7:29500'"),
        ("http://worker-1", "without a port, got 'http://worker-1'"),
        ("0.0.0.0", "is a wildcard address; use the address that other ranks connect to"),
        ("::", "is a wildcard address"),
    ],
)
def test_a_data_host_that_no_rank_can_connect_to_is_rejected(
    data_host: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPLB_AGENT_DATA_HOST", data_host)
    with pytest.raises(ValidationError, match=reason):
        AgentSettings()


@pytest.mark.parametrize("data_host", ["10.0.0.7", "fd00::7", "worker-1.workers", "localhost"])
def test_host_names_and_addresses_are_accepted_as_data_hosts(
    data_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPLB_AGENT_DATA_HOST", data_host)
    assert AgentSettings().data_host == data_host
