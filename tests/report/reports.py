"""A small replay and a parsed page, for the tests of reports and charts."""

from __future__ import annotations

from html.parser import HTMLParser

from eplb_core.planner.settings import PlannerSettings
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for, replay, scene_for
from eplb_service.replay.policy import Setup
from eplb_service.replay.result import Replay


def small_replay(
    policies: tuple[str, ...] = ("none", "deepseek", "flashlb"), slots: tuple[int, ...] = (5,)
) -> Replay:
    """Return a replay of three layers with 16 experts on 4 ranks, with four decisions."""
    heat_TLE = synthetic_heat("drift", 150, layers=3, experts=16, tokens=256, top_k=2, seed=5)
    jobs = jobs_for(policies, [Setup(count, 30, 30) for count in slots], PlannerSettings())
    costs = Costs(step_ms=20, bytes_per_expert=10_000_000, solve_ms=50)
    return replay(ArrayTrace(heat_TLE), jobs, scene_for(4, costs))


class Page(HTMLParser):
    """A parsed page: its currently open tags, all tags with their attributes, and the text by tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag = self.open[-1] if self.open else ""
        self.texts[tag] = self.texts.get(tag, "") + data
