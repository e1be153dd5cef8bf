"""Build eplb-service, one build at a time."""

import fcntl
import pathlib

from setuptools import setup

if __name__ == "__main__":
    with (pathlib.Path(__file__).resolve().parent / "pyproject.toml").open() as tree:
        # Two builds at the same time would delete each other's files in ``build``.
        fcntl.flock(tree, fcntl.LOCK_EX)
        setup()
