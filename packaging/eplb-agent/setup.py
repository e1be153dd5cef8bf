"""Builds eplb-agent out of the repository's packages: the agent, and what it shares with the service.

The folder holds no code of its own: a wheel (or an editable install) can be made of it, but no source archive. The
source archive of eplb-service contains this folder and all that it needs.
"""

import fcntl
import importlib.util
import pathlib

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ("eplb_service.placement", "eplb_service.placement.*", "eplb_service.wire", "eplb_service.wire.*")


def generate_stubs() -> None:
    """Run ``tools/generate_stubs.py``, the one place that knows how stubs are made."""
    spec = importlib.util.spec_from_file_location("generate_stubs", ROOT / "tools" / "generate_stubs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(ROOT)


class BuildAgent(build_py):
    """``build_py`` that first generates the stubs, and takes only ``__init__`` of the package it shares."""

    def run(self) -> None:
        """Generate, then build as usual."""
        generate_stubs()
        super().run()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of one package that eplb-agent ships."""
        found = super().find_package_modules(package, package_dir)
        return [entry for entry in found if package != "eplb_service" or entry[1] == "__init__"]


class NoSourceArchive(sdist):
    """``sdist`` that says why there is none."""

    def run(self) -> None:
        """Refuse."""
        raise SystemExit(
            "eplb-agent is built as a wheel, from a checkout of eplb-service, which has its sources"
        )


if __name__ == "__main__":
    packages = find_namespace_packages(
        str(ROOT),
        include=["eplb_service", *SHARED, "worker_agent", "worker_agent.*"],
        exclude=["*.__pycache__"],
    )
    with (ROOT / "packaging" / "eplb-agent" / "pyproject.toml").open() as tree:
        # Two builds at a time would take each other's files out of ``build``.
        fcntl.flock(tree, fcntl.LOCK_EX)
        setup(packages=packages, cmdclass={"build_py": BuildAgent, "sdist": NoSourceArchive})
