"""The service reports a certificate that expires soon as a problem and in metrics, until it is renewed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from eplb_service.control.server.service import run_service
from eplb_service.control.server.validity import Validity, first_to_expire
from tests.control.server.certificates import Authority
from tests.control.server.mutual_tls import flags, replace_file
from tests.control.server.service_under_test import settings, until

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the tests require openssl to generate certificates"
)
DAY = 86400.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.mark.parametrize("days", [1, 400, 20_000])
def test_the_validity_of_a_certificate_is_read_from_its_file(authority: Authority, days: int) -> None:
    """20,000 days end after 2049, and certificates encode later years with four digits instead of two."""
    certificate, _ = authority.sign("localhost", days=days)
    validity = first_to_expire(certificate.read_bytes())
    assert validity is not None
    assert validity.begins == pytest.approx(time.time(), abs=300)
    assert validity.ends - validity.begins == pytest.approx(days * DAY, abs=2)


def test_a_chain_expires_when_its_first_certificate_expires(authority: Authority) -> None:
    leaf, _ = authority.sign("localhost", days=9)
    chain = leaf.read_bytes() + authority.ca.read_bytes()
    assert first_to_expire(chain) == first_to_expire(authority.ca.read_bytes())


@pytest.mark.parametrize("content", [b"", b"no certificate", "cut"])
def test_an_unreadable_certificate_has_no_validity(authority: Authority, content: bytes | str) -> None:
    if isinstance(content, str):
        lines = authority.ca.read_bytes().splitlines()
        content = b"\n".join([lines[0], *lines[2:-4], lines[-1]])
    assert first_to_expire(content) is None


def test_a_certificate_counts_as_expiring_soon_in_its_last_two_weeks_or_last_quarter() -> None:
    year = Validity(0, 365 * DAY)
    day = Validity(0, DAY)
    assert [year.expires_soon(at * DAY) for at in (350, 352, 400)] == [False, True, True]
    assert [day.expires_soon(at * DAY) for at in (0, 0.74, 0.76)] == [False, False, True]


async def test_a_service_reports_an_expired_certificate_until_it_is_renewed(
    tmp_path: Path, authority: Authority
) -> None:
    tls_flags = flags(tmp_path, authority)
    certificate, key = authority.sign("localhost", expired=True)
    replace_file(tls_flags["tls_cert"], certificate.read_bytes())
    replace_file(tls_flags["tls_key"], key.read_bytes())
    async with run_service(settings(**tls_flags)) as service:
        deployment = service.plane._known.add("decode")

        def sample(name: str, file: str = "tls_cert") -> float | None:
            return service.plane._metrics.registry.get_sample_value(name, {"file": file})

        def service_problems() -> list[str]:
            return list(deployment.service_problems)

        await until(lambda: bool(service_problems()) and sample("eplb_certificate_expires_soon") == 1)
        (problem,) = service_problems()
        assert "a certificate in tls_cert has expired: renew the file" in problem
        assert sample("eplb_certificate_expiry_seconds") < 0  # type: ignore[operator]
        assert sample("eplb_certificate_expires_soon", "tls_client_ca") == 0
        for new, old in zip(
            authority.sign("localhost"), (tls_flags["tls_cert"], tls_flags["tls_key"]), strict=True
        ):
            replace_file(old, new.read_bytes())
        await until(lambda: service_problems() == [] and sample("eplb_certificate_expires_soon") == 0)
        assert sample("eplb_certificate_expiry_seconds") == pytest.approx(2 * DAY, abs=300)
