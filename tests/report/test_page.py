"""A report is one self-contained file that shows the replay's results and escapes every name."""

import re
from dataclasses import replace

import pytest

from eplb_service.replay.costs import Assumption
from eplb_service.report.page import report_page
from eplb_service.report.pictures import pictures_of
from tests.report.reports import Page, small_replay

ASSUMPTIONS = [Assumption("link_bandwidth", "25 GB/s", "assumed <b>here</b>")]
TITLE = "Replay of </script><script>alert(1)</script>"
COMMAND = "eplb replay --heat a.zarr --ranks 4 && echo 'quoted'"


def report(replay):
    return report_page(
        replay, title=TITLE, command=COMMAND, facts={"trace": "made up <b>here</b>"}, assumptions=ASSUMPTIONS
    )


@pytest.fixture(scope="module")
def replayed():
    return small_replay()


@pytest.fixture(scope="module")
def html(replayed):
    return report(replayed)


def test_a_report_is_self_contained_and_every_chart_has_alternative_text(html, replayed):
    page = Page(html)
    assert page.open == []
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len({image["alt"] for image in images}) == len(pictures_of(replayed)) == len(images)
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in images)
    assert not re.search(r"href|url\(|@import|http|<script", html)


def test_names_are_escaped(html):
    page = Page(html)
    assert TITLE in page.texts["h1"]
    assert COMMAND in page.texts["pre"]
    assert "made up <b>here</b>" in page.texts["dd"]
    assert "25 GB/s (assumed <b>here</b>)" in page.texts["dd"]


def test_a_report_shows_the_figures_of_every_policy(html, replayed):
    page = Page(html)
    for policy in replayed.policies:
        assert f"{policy.par_realised:.3f}" in page.texts["td"]
        assert policy.label in page.texts["td"]
    assert {"GB", "saved ms"} <= set(re.findall("<th>(.*?)</th>", html))
    tiles = re.findall(r"<div><b>(.*?)</b>(.*?)</div>", html)
    assert any(label == "PAR lower than with the initial placement" for _, label in tiles)
    assert not re.search(r"\de[+-]?\d", "".join(page.texts[tag] for tag in ("b", "div", "dd", "td")))


def test_the_basis_of_the_figures_is_collapsed(html):
    assert "<details open" not in html
    summaries = re.findall(r"<details><summary>(.*?)</summary>", html)
    assert summaries == ["Assumptions behind times and prices", "Terms", "Trace and settings"]
    visible = re.sub(r"<details>.*?</details>", "", html, flags=re.DOTALL)
    assert "<dd>" not in visible


def test_the_report_of_an_interrupted_replay_says_that_it_stopped_early(html, replayed):
    assert "stopped early" not in html
    assert "stopped early" in report(replace(replayed, interrupted=True))


def test_a_report_says_that_no_policy_helps():
    assert "No policy does better than the initial placement" in report(small_replay(("none",)))
