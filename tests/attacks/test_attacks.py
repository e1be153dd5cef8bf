"""Tests that every attack on a real service is rejected or has a bounded cost. ``make attack`` prints the table."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.attacks.attempts import ATTEMPTS, Attempt
from tests.attacks.target import CREDENTIALS, FLAGS, Target
from tests.e2e.service import Service, free_address

pytestmark = [pytest.mark.faults]
_MOST_BYTES = 1 << 30

Services = dict[bool, Service]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Start an open service and one that requires credentials."""
    flags = [str(part) for pair in FLAGS.items() for part in pair]
    folder = tmp_path_factory.mktemp("attacks")
    (folder / "locked").mkdir()
    credentials = folder / "credentials.yaml"
    credentials.write_text(CREDENTIALS)
    with (
        Service(folder, *flags, "--health", free_address()) as unlocked,
        Service(
            folder / "locked", *flags, "--health", free_address(), "--credentials", str(credentials)
        ) as locked,
    ):
        yield {False: unlocked, True: locked}


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[Attempt, str]]]:
    rows: list[tuple[Attempt, str]] = []
    yield rows
    print("\n\n| attempt | service | proves that | outcome |\n|---|---|---|---|")
    for attempt, outcome in rows:
        service = "locked" if attempt.locked else "open"
        print(f"| {attempt.name} | {service} | {attempt.proves} | {outcome} |")


def test_there_are_at_least_50_attempts_with_distinct_names() -> None:
    assert len({attempt.name for attempt in ATTEMPTS}) == len(ATTEMPTS) >= 50


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
async def test_an_attempt_is_rejected_or_its_cost_is_bounded(
    attempt: Attempt, services: Services, table: list[tuple[Attempt, str]]
) -> None:
    service = services[attempt.locked]
    async with grpc.aio.insecure_channel(service.address) as channel:
        target = Target(service, channel)
        table.append((attempt, await attempt.run(target)))
        assert target.resident_bytes < _MOST_BYTES
