"""Build step: generate the gRPC stubs of ``proto/`` into ``eplb_service/wire/generated``."""

import importlib.util
import pathlib
import sys

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent.resolve()


def generate_stubs() -> None:
    """Run ``tools/generate_stubs.py``, the one place that knows how stubs are made."""
    spec = importlib.util.spec_from_file_location("generate_stubs", ROOT / "tools" / "generate_stubs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(ROOT)


class BuildWithStubs(build_py):
    """``build_py`` that first generates the stubs, for wheels and editable installs alike."""

    def run(self) -> None:
        """Generate, then build as usual."""
        generate_stubs()
        super().run()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    setup(cmdclass={"build_py": BuildWithStubs})
