"""A report is one file that fetches nothing, shows what the replay found, and is safe whatever the names in it."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from eplb_service.replay.costs import Assumption
from eplb_service.report.page import report_page
from eplb_service.report.pictures import pictures_of
from tests.report.reports import small_replay

ASSUMPTIONS = [Assumption("link_bandwidth", "25 GB/s", "assumed <b>here</b>")]
TITLE = "Replay of </script><script>alert(1)</script>"
COMMAND = "eplb replay --heat a.zarr --ranks 4 && echo 'quoted'"


class Page(HTMLParser):
    """Tags, whether they are closed, and what is in them."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.texts = [], [], {}
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        tag = self.open[-1] if self.open else ""
        self.texts[tag] = self.texts.get(tag, "") + data


def report(found):
    return report_page(
        found, title=TITLE, command=COMMAND, facts={"trace": "made up <b>here</b>"}, assumptions=ASSUMPTIONS
    )


@pytest.fixture(scope="module")
def replayed():
    return small_replay()


@pytest.fixture(scope="module")
def html(replayed):
    return report(replayed)


def test_whole_with_every_chart_named_and_nothing_fetched(html, replayed):
    page = Page(html)
    assert page.open == []
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len({image["alt"] for image in images}) == len(pictures_of(replayed)) == len(images)
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in images)
    assert not re.search(r"href|url\(|@import|http|<script", html)


def test_names_cannot_break_out(html):
    page = Page(html)
    assert TITLE in page.texts["h1"]
    assert COMMAND in page.texts["pre"]
    assert "made up <b>here</b>" in page.texts["dd"]
    assert "25 GB/s (assumed <b>here</b>)" in page.texts["dd"]


def test_shows_what_was_found(html, replayed):
    page = Page(html)
    for policy in replayed.policies:
        assert f"{policy.par_realised:.3f}" in page.texts["td"]
        assert policy.label in page.texts["td"]
    assert {"GB", "saved ms"} <= set(re.findall("<th>(.*?)</th>", html))
    tiles = re.findall(r"<div><b>(.*?)</b>(.*?)</div>", html)
    assert any(label == "PAR lower than with the initial placement" for _, label in tiles)
    assert not re.search(r"\de[+-]?\d", "".join(page.texts[tag] for tag in ("b", "div", "dd", "td")))


def test_assumptions_and_terms_are_folded(html):
    assert "<details open" not in html
    folded = re.findall(r"<details><summary>(.*?)</summary>", html)
    assert folded == ["Assumptions behind times and prices", "Terms", "Trace and settings"]
    unfolded = re.sub(r"<details>.*?</details>", "", html, flags=re.DOTALL)
    assert "<dd>" not in unfolded


def test_a_stopped_replay_says_so(html, replayed):
    assert "stopped early" not in html
    assert "stopped early" in report(replace(replayed, interrupted=True))


def test_when_nothing_helps_the_report_says_so():
    assert "No policy does better than the initial placement" in report(small_replay(("none",)))
