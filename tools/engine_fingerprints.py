"""Records how the functions that an adapter relies on look in the engine that is installed, in its ``known.json``.

Run it with the engine's own Python, from the repository: ``python tools/engine_fingerprints.py vllm 0.32``.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from worker_agent.adapters.compat import fingerprint


def main(engine: str, release: str) -> None:
    """Write the release's entry; a function that it does not have is left out and named."""
    package = importlib.import_module(f"worker_agent.adapters.{engine}.known")
    path = Path(package.__file__ or "").with_name("known.json")
    known = json.loads(path.read_text()) if path.exists() else {}
    known[release] = {}
    for target in package.TARGETS:
        try:
            found = fingerprint(target)
        except (ImportError, AttributeError) as error:
            print(f"{release} does not have {target}: {error}", file=sys.stderr)
            continue
        known[release][target] = {"parameters": list(found.parameters), "source": found.source}
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
