"""Engines' sources for tests, which are skipped where the package index does not serve them."""

import pytest

from tools import engine_sources
from tools.engine_sources import SourceUnavailableError


def source_of(package, release):
    """A folder that holds the package's folder; downloaded once per machine."""
    return _or_skip(engine_sources.source_of, package, release)


def newest(package):
    """The newest release on the package index that is no release candidate."""
    return _or_skip(engine_sources.newest, package)


def _or_skip(fetch, *arguments):
    try:
        return fetch(*arguments)
    except SourceUnavailableError as error:
        pytest.skip(f"NOT TESTED: {error}")
