"""The service sees when its certificates expire, in a problem and in metrics, and a renewal ends both."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from eplb_service.control.server.service import running_service
from eplb_service.control.server.validity import Validity, first_to_expire
from tests.control.server.certificates import Authority
from tests.control.server.mutual_tls import flags, replace_file
from tests.control.server.service_under_test import settings, until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
DAY = 86400.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.mark.parametrize("days", [1, 400, 20_000])
def test_a_certificate_is_valid_as_long_as_it_was_signed_for(authority: Authority, days: int) -> None:
    """20,000 days reach beyond 2050, from which on times are written with four digits of the year."""
    certificate, _ = authority.sign("localhost", days=days)
    found = first_to_expire(certificate.read_bytes())
    assert found is not None
    assert found.begins == pytest.approx(time.time(), abs=300)
    assert found.ends - found.begins == pytest.approx(days * DAY, abs=2)


def test_of_a_chain_the_first_to_expire_counts(authority: Authority) -> None:
    leaf, _ = authority.sign("localhost", days=9)
    chain = leaf.read_bytes() + authority.ca.read_bytes()
    assert first_to_expire(chain) == first_to_expire(authority.ca.read_bytes())


@pytest.mark.parametrize("content", [b"", b"no certificate", "cut"])
def test_what_cannot_be_read_has_no_validity(authority: Authority, content: bytes | str) -> None:
    if isinstance(content, str):
        lines = authority.ca.read_bytes().splitlines()
        content = b"\n".join([lines[0], *lines[2:-4], lines[-1]])
    assert first_to_expire(content) is None


def test_soon_is_two_weeks_or_a_quarter_of_a_short_validity() -> None:
    year, day = Validity(0, 365 * DAY), Validity(0, DAY)
    assert [year.expires_soon(at * DAY) for at in (350, 352, 400)] == [False, True, True]
    assert [day.expires_soon(at * DAY) for at in (0, 0.74, 0.76)] == [False, False, True]


async def test_a_service_reports_a_certificate_that_expires_until_it_is_renewed(
    tmp_path: Path, authority: Authority
) -> None:
    given = flags(tmp_path, authority)
    certificate, key = authority.sign("localhost", expired=True)
    replace_file(given["tls_cert"], certificate.read_bytes())
    replace_file(given["tls_key"], key.read_bytes())
    async with running_service(settings(**given)) as service:
        deployment = service.plane._known.add("decode")

        def sample(name: str, file: str = "tls_cert") -> float | None:
            return service.plane._metrics.registry.get_sample_value(name, {"file": file})

        def listed() -> list[str]:
            return list(deployment.service_problems)

        await until(lambda: bool(listed()) and sample("eplb_certificate_expires_soon") == 1)
        (problem,) = listed()
        assert "a certificate of tls_cert has expired: renew the file" in problem
        assert sample("eplb_certificate_expiry_seconds") < 0  # type: ignore[operator]
        assert sample("eplb_certificate_expires_soon", "tls_client_ca") == 0
        for new, old in zip(authority.sign("localhost"), (given["tls_cert"], given["tls_key"]), strict=True):
            replace_file(old, new.read_bytes())
        await until(lambda: listed() == [] and sample("eplb_certificate_expires_soon") == 0)
        assert sample("eplb_certificate_expiry_seconds") == pytest.approx(2 * DAY, abs=300)
