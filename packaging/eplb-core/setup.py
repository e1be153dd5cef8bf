"""Build eplb-core from the package ``eplb_core`` of the repository."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from building import build

if __name__ == "__main__":
    build("eplb-core", "eplb_core", stubs=True)
