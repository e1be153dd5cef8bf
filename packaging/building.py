"""Build step that the distributions in this directory share.

Each subdirectory contains only a README, a ``pyproject.toml`` and a ``setup.py``. The code is in the corresponding
package at the root of the repository. Wheels and editable installs can be built here, but not source archives: the
source archive of eplb-service contains all of these directories.
"""

from __future__ import annotations

import fcntl
import importlib.util
import pathlib

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = pathlib.Path(__file__).resolve().parents[1]


def generate_stubs() -> None:
    """Run ``tools/generate_stubs.py``, the only place that generates the gRPC stubs."""
    spec = importlib.util.spec_from_file_location("generate_stubs", ROOT / "tools" / "generate_stubs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(ROOT)


class BuildWithStubs(build_py):
    """``build_py`` that generates the gRPC stubs first."""

    def run(self) -> None:
        """Generate the stubs, then build."""
        generate_stubs()
        super().run()


class NoSourceArchive(sdist):
    """``sdist`` that refuses to run and says why."""

    def run(self) -> None:
        """Exit with an error."""
        raise SystemExit(
            "cannot build a source archive here; build a wheel, or use the source archive of eplb-service"
        )


def build(distribution: str, package: str, *, stubs: bool = False) -> None:
    """Build one distribution.

    Parameters
    ----------
    distribution
        Directory next to this file, such as ``eplb-core``.
    package
        Package at the root of the repository that the distribution contains.
    stubs
        True if the package contains the gRPC stubs.
    """
    packages = find_namespace_packages(
        str(ROOT), include=[package, f"{package}.*"], exclude=["*.__pycache__"]
    )
    commands = {"sdist": NoSourceArchive} | ({"build_py": BuildWithStubs} if stubs else {})
    with (ROOT / "packaging" / distribution / "pyproject.toml").open() as tree:
        # Concurrent builds would delete each other's files in ``build``.
        fcntl.flock(tree, fcntl.LOCK_EX)
        setup(packages=packages, package_dir={package: f"../../{package}"}, cmdclass=commands)
