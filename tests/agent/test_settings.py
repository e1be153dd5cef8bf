"""Settings of an agent that cannot work, or would give its token away, are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent import live


def test_a_token_is_not_sent_in_plain_text_to_another_host(tmp_path: Path) -> None:
    for given in ({"auth_token": "sesame"}, {"auth_token_file": tmp_path / "token"}):
        with pytest.raises(ValueError, match="would be sent in plain text"):
            live.settings(service="eplb:50551", **given)
        live.settings(service="eplb:50551", tls_ca=tmp_path / "ca.pem", **given)
        live.settings(service="eplb:50551", plaintext_token=True, **given)
        live.settings(service="[::1]:50551", **given)


def test_a_token_in_a_file_is_read_at_every_connection(tmp_path: Path) -> None:
    path = tmp_path / "token"
    settings = live.settings(auth_token_file=path)
    for token in ("first", "second"):
        path.write_text(token + "\n")
        assert settings.token() == token
    with pytest.raises(ValueError, match="not both"):
        live.settings(auth_token_file=path, auth_token="third")


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="vote_lag 5 is past vote_interval 4"):
        live.settings(vote_lag=5)
