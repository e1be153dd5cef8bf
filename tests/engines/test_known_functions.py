"""Tests that the adapters' assumptions about engines hold for each known release and for the newest on the index."""

import pytest

from tests.engines.engine_source import newest, source_of
from tools.engine_fingerprints import moved
from tools.engine_sources import VERSIONS
from tools.model_families import PAGE, page
from worker_agent.adapters import compat

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

KNOWN = {
    package: compat.read_known(f"worker_agent.adapters.{package}")
    for package in ("vllm", "vllm_ascend", "sglang")
}


@pytest.mark.parametrize("package", VERSIONS)
def test_every_known_function_matches_its_release(package):
    versions = {compat.release_of(version, KNOWN[package]): version for version in VERSIONS[package]}
    assert set(versions) == set(KNOWN[package])
    for release, version in versions.items():
        assert moved(source_of(package, version), KNOWN[package][release]) == {}, version


@pytest.mark.parametrize("package", VERSIONS)
def test_the_newest_release_changes_no_known_function(package):
    """On failure, check how the functions changed and update the adapter.

    Then run the engine, and record the release in ``known.json``.
    """
    version = newest(package)
    last = compat.nearest(version, KNOWN[package])
    assert moved(source_of(package, version), KNOWN[package][last]) == {}, f"{package} {version}"


def test_a_hooked_function_that_a_release_lacks_is_reported():
    differences = moved(source_of("vllm", "0.23.0"), KNOWN["vllm"]["0.33"])
    target = "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.get_expert_weights"
    assert differences[target] == "is missing"


def test_the_model_list_matches_the_engine_sources():
    """Regenerate the list with ``python -m tools.model_families``."""
    for package in ("vllm", "sglang"):
        for version in VERSIONS[package]:
            source_of(package, version)
    assert PAGE.read_text() == page()
