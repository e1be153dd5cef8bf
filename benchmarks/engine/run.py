"""Tokens of a real vLLM server, timed with the agent beside one without: ``make bench-engine``.

Two servers on CPU, two tensor-parallel ranks each, get the same waves of requests by turns, so that a busy machine
slows both. One has vLLM's EPLB off and no agent; the other is balanced by a real service, which decides every 32 steps,
far more often than any deployment would. Every token must be the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.switch.ratios import Ratio
from tests.e2e.service import Service
from tests.engines.conftest import DECIDE_OFTEN, engine_environment, make_agent_site
from tests.engines.environments import VLLM_032, python_of
from tests.engines.generate_vllm import prompts
from tests.engines.openai_server import TOKEN_IDS_ALONE, OpenAiServer, TimedTokens

_ENGINES = Path(__file__).parents[2] / "tests" / "engines"
_RANKS = ["-tp", "2", "--enable-expert-parallel", *TOKEN_IDS_ALONE]
_EPLB = ["--enable-eplb", "--eplb-config", '{"num_redundant_experts": 4, "use_async": false}']
_TARGET = 1.1


def main() -> None:
    """Start both, print the ratios and percentiles; exit code 1 where a token differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waves", type=int, default=20, help="of requests to each server (20)")
    parser.add_argument("--requests", type=int, default=4, help="at once in a wave (4)")
    parser.add_argument("--tokens", type=int, default=64, help="per request (64)")
    parser.add_argument("--json", type=Path, default=None, help="write all figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eplb-bench-") as name:
        folder = Path(name)
        with Service(folder, "--store", f"{folder}/store.sqlite3", *DECIDE_OFTEN.split()) as service:
            servers = _servers(folder, service)
            try:
                found = _by_turns(servers, options.waves, options.requests, options.tokens)
            finally:
                for server in servers:
                    server.stop()
            switched = service.status().status.layers_switched
    report = _report(found) | {"layers_switched": switched}
    for line in report["ratios"]:
        print(Ratio(**line).line)
    for server, figures in report["milliseconds"].items():
        print(f"{server:<10}" + "".join(f"{name} {value:8.1f} ms   " for name, value in figures.items()))
    print(f"layers switched while these requests were served: {switched}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    same = [answer.ids for answer in found[0]] == [answer.ids for answer in found[1]]
    sys.exit(None if same else "the two servers answered different tokens")


def _servers(folder: Path, service: Service) -> list[OpenAiServer]:
    """With and without the agent, both ready."""
    python, site, checkpoint = python_of(VLLM_032), make_agent_site(folder), folder / "checkpoint"
    subprocess.run([python, _ENGINES / "make_checkpoint.py", checkpoint], check=True, capture_output=True)
    balanced = engine_environment(
        site, EPLB_AGENT_SERVICE=service.address, EPLB_AGENT_VERIFY_TRANSFERS="false"
    )
    servers = [
        OpenAiServer(python, folder / "balanced.log", checkpoint, [*_RANKS, *_EPLB], balanced),
        OpenAiServer(python, folder / "alone.log", checkpoint, _RANKS, engine_environment(site)),
    ]
    for server in servers:
        server.wait_until_healthy()
    return servers


def _by_turns(
    servers: list[OpenAiServer], waves: int, requests: int, tokens: int
) -> tuple[list[TimedTokens], list[TimedTokens]]:
    found: tuple[list[TimedTokens], list[TimedTokens]] = ([], [])
    for wave in range(-2, waves):
        asked = prompts(requests, seed=100 + wave)
        for place in (0, 1) if wave % 2 else (1, 0):
            answers = servers[place].answers(asked, tokens)
            # The first two warm both servers up.
            if wave >= 0:
                found[place].extend(answers)
    return found


def _report(found: tuple[list[TimedTokens], list[TimedTokens]]) -> dict[str, object]:
    first = [[answer.first_token for answer in answers] for answers in found]
    each = [[float(np.mean(answer.per_token)) for answer in answers] for answers in found]
    ratios = [
        Ratio.of("time to first token, agent / no agent", first[0], first[1], _TARGET),
        Ratio.of("time per token, agent / no agent", each[0], each[1], _TARGET),
    ]
    milliseconds = {}
    for name, answers in zip(("agent", "no agent"), found, strict=True):
        gaps = [gap for answer in answers for gap in answer.per_token]
        firsts = [answer.first_token for answer in answers]
        milliseconds[name] = {
            f"{what} p{percent}": 1e3 * float(np.percentile(values, percent))
            for what, values in (("first token", firsts), ("per token", gaps))
            for percent in (50, 99)
        }
    return {"ratios": [vars(ratio) for ratio in ratios], "milliseconds": milliseconds}


if __name__ == "__main__":
    main()
