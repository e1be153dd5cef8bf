"""Build step of eplb-service: generate the wire stubs, then build as usual."""

import fcntl
import importlib.util
import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent


def generate_stubs() -> None:
    """Run ``tools/generate_stubs.py``, the one place that knows how stubs are made."""
    spec = importlib.util.spec_from_file_location("generate_stubs", ROOT / "tools" / "generate_stubs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(ROOT)


class BuildService(build_py):
    """``build_py`` that first generates the stubs."""

    def run(self) -> None:
        """Generate, then build as usual."""
        generate_stubs()
        super().run()


if __name__ == "__main__":
    with (ROOT / "pyproject.toml").open() as tree:
        # Two builds at a time would take each other's files out of ``build``.
        fcntl.flock(tree, fcntl.LOCK_EX)
        setup(cmdclass={"build_py": BuildService})
