"""Fixture for a group of eight ranks that all layer tests share. A case uses some or all of the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[Ranks]:
    with Ranks(8, deadline=240.0) as ranks:
        yield ranks
