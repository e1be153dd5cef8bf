"""A report is one file that fetches nothing, shows what the replay found, and is safe whatever the names in it."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.replay.policy import NAMES
from eplb_service.report import charts
from eplb_service.report.svg import Scale, _plain, element
from tests.report.reports import COMMAND, TITLE, small_replay, small_report

CHARTS = {"par", "colours", "before", "after", "alone", "balanced", "moves", "pareto"}


class Page(HTMLParser):
    """Tags, whether they are closed, and what is in them."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.ids, self.texts = [], [], [], {}
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        tag = self.open[-1] if self.open else ""
        self.texts[tag] = self.texts.get(tag, "") + data


@pytest.fixture(scope="module")
def replayed():
    return small_replay()


@pytest.fixture(scope="module")
def html(replayed):
    return small_report(replayed)


def test_whole_and_well_formed(html):
    page = Page(html)
    assert page.open == []
    assert set(page.ids) >= CHARTS | {"data", "tip"}
    assert len(page.ids) == len(set(page.ids))


def test_fetches_nothing(html):
    assert not re.search(r"(?:src|href|url|@import|fetch|XMLHttp)\s*[=(]", html)
    assert "http" not in html.replace("http-equiv", "")


def test_names_cannot_break_out(html):
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert TITLE in page.texts["h1"]
    assert COMMAND in page.texts["pre"]
    assert "made up <b>here</b>" in page.texts["dd"]


def test_shows_what_was_found(html, replayed):
    page = Page(html)
    for policy in replayed.policies:
        assert f"{policy.par_realised:.3f}" in page.texts["td"]
        assert policy.label in page.texts["td"]
    data = json.loads(page.texts["script"].split("\n")[0].strip() or page.texts["script"])
    assert data["par"]["lines"][-1]["values"] == [
        round(decision.par_realised, 4) for decision in replayed.policies[-1].decisions
    ]
    before = replayed.baselines[0].loads_LR
    shares = np.round(before / before.mean(axis=1, keepdims=True), 3)
    assert data["maps"]["before"]["values"] == shares.tolist()


def test_a_stopped_replay_says_so(replayed):
    assert "stopped early" not in small_report(replayed)
    assert "stopped early" in small_report(replace(replayed, interrupted=True))


def test_sweeps_and_replays_without_hindsight_have_reports():
    swept = small_report(small_replay(("flashlb",), slots=(4, 5)))
    assert "flashlb, 4 slots" in swept
    assert "left alone, 5 slots" in swept


def test_when_nothing_helps_the_report_says_so():
    assert "Nothing that was tried is better" in small_report(small_replay(("none",)))


def test_one_line_a_policy_and_one_bar_a_decision(html, replayed):
    page = Page(html)
    lines = [named for tag, named in page.tags if tag == "path" and "line" in named.get("class", "")]
    assert [line["data-series"] for line in lines] == ["floor", "hindsight", "none", "deepseek", "flashlb"]
    bars = [named for tag, named in page.tags if tag == "rect" and "bar" in named.get("class", "")]
    assert len(bars) == sum(len(policy.decisions) for policy in replayed.policies if policy.policy != "none")


def test_the_front_is_what_none_beats_in_both():
    points = [
        charts.Point(name, "s0", moves, par)
        for name, moves, par in [("a", 0, 2.0), ("b", 0.1, 1.5), ("c", 0.2, 1.6), ("d", 0.3, 1.2)]
    ]
    assert [point.name for point in charts._front(points)] == ["a", "b", "d"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1.02, 1.31, [1.1, 1.2, 1.3]),
        (3, 3, [3]),
        (0, 10_000, [0, 2000, 4000, 6000, 8000, 10_000]),
    ],
)
def test_ticks_are_round_and_within(low, high, ticks):
    assert Scale(low, high, 0, 100).ticks() == pytest.approx(ticks)


@given(low=st.floats(-100, 100), span=st.floats(1e-3, 1e4), about=st.integers(2, 8))
def test_a_whole_scale_has_a_tick_at_both_ends_and_no_value_outside(low, span, about):
    narrow = Scale(low, low + span, 0, 100)
    whole = narrow.whole(about)
    ticks = whole.ticks(about)
    assert [whole.low, whole.high] == pytest.approx([ticks[0], ticks[-1]], abs=1e-9)
    assert whole.low <= narrow.low + 1e-6 * span
    assert whole.high >= narrow.high - 1e-6 * span
    assert whole.high - whole.low <= 4 * span


def test_of_many_dots_those_that_none_beats_are_named_and_all_have_a_tip():
    points = [charts.Point(f"policy {number:02}", "s0 d1", 0.5, 1.3 + number / 1e4) for number in range(30)]
    drawn = charts._pareto([*points, charts.Point("best", "s1 d0", 0.4, 1.1)])
    assert drawn.count("<circle") == drawn.count("<title>") == 31
    assert "<title>policy 07: PAR 1.301, 50.0% of the slots</title>" in drawn
    named = re.findall(r">([^<>]+)</text>", drawn)
    assert "best" in named
    assert 1 <= sum(name.startswith("policy") for name in named) < 30


def test_elements():
    made = element("a", class_="x", stroke_width=1.5, y=2.0, none=None)
    assert made == '<a class="x" stroke-width="1.5" y="2"/>'
    assert (_plain(1.5), _plain(2000.0), _plain(0.05)) == ("1.5", "2,000", "0.05")


def test_as_many_policies_as_have_a_name_look_different():
    replayed = SimpleNamespace(
        policies=[
            SimpleNamespace(label=f"{name}, {slots} slots", policy=name) for name in NAMES for slots in (8, 9)
        ]
    )
    colours = charts.colours_of(replayed)
    acting = [colour for label, colour in colours.items() if not label.startswith("none")]
    assert len(acting) == len(set(acting)) == 2 * (len(NAMES) - 1)
    css = files("eplb_service.report").joinpath("report.css").read_text()
    css += files("eplb_service.report").joinpath("charts.css").read_text()
    for dashes in {colour.split()[1] for colour in acting} - {"d0"}:
        assert f".line.{dashes} " in css
        assert f".dot.{dashes}" in css
        assert f"i.{dashes}" in css
