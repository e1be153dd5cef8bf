"""Engine sources for tests. Tests are skipped if the package index does not provide them."""

import pytest

from tools import engine_sources
from tools.engine_sources import SourceUnavailableError


def source_of(package, release):
    """Return a directory that contains the package's directory. It is downloaded once per machine."""
    return _or_skip(engine_sources.source_of, package, release)


def newest(package):
    """Return the newest release on the package index that is not a release candidate."""
    return _or_skip(engine_sources.newest, package)


def _or_skip(fetch, *arguments):
    try:
        return fetch(*arguments)
    except SourceUnavailableError as error:
        pytest.skip(f"NOT TESTED: {error}")
