"""The page of a proof is one self-contained file with the figures, the method and its limits."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from eplb_service.replay.answers import Answers
from eplb_service.replay.costs import Assumption, Costs
from eplb_service.replay.proof import Arm, Proof
from eplb_service.report.proof_page import conclusions, proof_page, text_rows
from tests.cost.curves import H200
from tests.report.reports import Page, small_replay

TITLE = "Proof for </script><script>alert(1)</script>"
ANSWERS = Answers(2, 1, 20, 0, "request <a>, token 3")


def arm(name: str, par: float, moves: int | None = 0) -> Arm:
    noise_T = np.random.default_rng(len(name)).normal(0, 0.02, 120)
    return Arm(name, f"note of {name}", par + noise_T, None, moves)


@pytest.fixture(scope="module")
def proof() -> Proof:
    replay = replace(small_replay(("flashlb",)), costs=Costs())
    arms = (arm("off", 1.6), arm("vllm", 1.3, 90), arm("ours", 1.2, 30), arm("forced balance", 1.0, None))
    return Proof(arms, replay, replay.policies[0].setup)


def page(proof: Proof, measured: str = "") -> str:
    assumption = Assumption("link_bandwidth", "25 GB/s", "assumed <b>here</b>")
    return proof_page(
        proof,
        title=TITLE,
        command="eplb prove --heat a && b",
        facts={"trace": "made up <b>here</b>"},
        assumptions=[assumption],
        answers=ANSWERS,
        measured=measured,
    )


def test_the_page_is_self_contained_and_escapes_every_name(proof: Proof) -> None:
    html = page(proof)
    parsed = Page(html)
    assert parsed.open == []
    assert TITLE in parsed.texts["h1"]
    assert "made up <b>here</b>" in parsed.texts["dd"]
    assert "request <a>, token 3" in parsed.texts["p"]
    assert not re.search(r"href|url\(|@import|http|<script", html)
    images = [attributes for tag, attributes in parsed.tags if tag == "img"]
    assert [image["alt"] for image in images] == ["Peak-to-average ratio by block"]


def test_the_page_shows_every_figure_and_states_the_limits(proof: Proof) -> None:
    html = unescape(page(proof, "The service reports 3 ms."))
    for row in text_rows(proof):
        assert all(f"<td>{cell}</td>" in html for cell in row.values())
    for limit in (
        "computed and never run",
        "says nothing about milliseconds",
        "does not pause",
        "take effect at once",
    ):
        assert limit in html
    assert "The service reports 3 ms." in html
    curve = replace(proof, replay=replace(proof.replay, costs=Costs(curve=H200, step_ms=20)))
    html = page(curve)
    assert "according to the cost curve" in html
    assert "take effect at once" not in html


def test_conclusions_compare_our_planner_with_every_balancer(proof: Proof) -> None:
    ours, vllm, tokens = conclusions(proof, ANSWERS)
    assert re.match(
        r"Our planner lowers PAR from 1\.\d{3} to 1\.\d{3}, which is 6\d% ±\d% of the gain of forced", ours
    )
    assert "moves 30 experts" in ours
    assert re.match(r"vllm: PAR 1\.\d{3}, 0\.\d{3} ±0\.0\d\d above ours; 90 experts moved\.", vllm)
    assert tokens == f"Tokens: {ANSWERS}."


def test_a_difference_within_the_interval_is_not_claimed(proof: Proof) -> None:
    off, vllm, ours, forced = proof.arms
    alike = replace(proof, arms=(off, replace(vllm, par_T=ours.par_T[::-1].copy()), ours, forced))
    assert "not distinguishable from ours" in list(conclusions(alike))[1]
    useless = replace(proof, arms=(off, vllm, replace(ours, par_T=off.par_T[::-1].copy()), forced))
    assert next(conclusions(useless)).startswith("These steps do not show a gain")
