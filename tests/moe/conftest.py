"""One group of eight ranks serves all tests of the layer; a case uses as many of them as it needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[Ranks]:
    with Ranks(8, deadline=240.0) as ranks:
        yield ranks
