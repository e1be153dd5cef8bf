"""Engine sources for tests, which are skipped if the package index does not provide them."""

import pytest

from tools import engine_sources
from tools.engine_sources import SourceUnavailableError


def source_of(package, release):
    """Return a folder that contains the package's folder, downloaded once per machine."""
    return _or_skip(engine_sources.source_of, package, release)


def newest(package):
    """Return the newest release on the package index that is not a release candidate."""
    return _or_skip(engine_sources.newest, package)


def _or_skip(fetch, *arguments):
    try:
        return fetch(*arguments)
    except SourceUnavailableError as error:
        pytest.skip(f"NOT TESTED: {error}")
