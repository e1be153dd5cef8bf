"""Run one decoder under atheris, which mutates inputs towards uncovered code. ``tests.fuzz.fuzz`` starts it.

Run ``python -m tests.fuzz.guided DECODER LIBFUZZER_OPTIONS CORPUS`` in an environment that has atheris.
"""

from __future__ import annotations

import sys
import warnings

import atheris

with atheris.instrument_imports(include=["eplb_core", "eplb_lab", "eplb_service", "worker_agent"]):
    from tests.fuzz.decoders import DECODERS, outcome_of


def main() -> None:
    """Run the fuzzer. This function never returns, because libFuzzer terminates the process."""
    decoder = DECODERS[sys.argv[1]]
    warnings.simplefilter("error")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], lambda data: outcome_of(decoder, data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
