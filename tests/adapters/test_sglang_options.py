"""What the SGLang adapter refuses, with the option and the reason, and what it derives from options."""

from dataclasses import replace

import pytest

from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.adapters.sglang.options import SglangOptions

PLAIN = SglangOptions("dynamic", "none", True, "stat", 8, 8, 1, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dispatch": "lp"}, "--ep-dispatch-algorithm lp"),
        ({"dispatch": "fake"}, "--ep-dispatch-algorithm fake"),
        ({"pipeline_parallel": 2}, "pipeline parallelism"),
        ({"expert_parallel": 4}, "--ep-size 4 with --tp-size 8"),
        ({"context_parallel": 2}, "context parallelism"),
        ({"replicas": 2}, "--dp-size 2"),
        ({"recorder": "stat_approx"}, "recorder-mode stat_approx"),
        ({"all_to_all": "mori"}, "--moe-a2a-backend mori"),
        ({"unsupported": (("--enable-pdmux", "Two passes run at once"),)}, "pdmux. Two passes run at once"),
    ],
)
def test_what_cannot_be_balanced_is_refused_by_name(changes, said):
    with pytest.raises(UnsupportedEngineError, match="unset EPLB_AGENT_SERVICE") as refusal:
        replace(PLAIN, **changes).check(allow_unverified=False)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    "changes", [{}, {"dispatch": "static", "all_to_all": "deepep"}, {"all_to_all": "deepep"}]
)
def test_what_can_be_balanced_passes(changes):
    replace(PLAIN, **changes).check(allow_unverified=False)


def test_an_unread_backend_can_be_tried_but_nothing_that_is_known_to_fail():
    replace(PLAIN, all_to_all="mori").check(allow_unverified=True)
    with pytest.raises(UnsupportedEngineError):
        replace(PLAIN, all_to_all="mori", dispatch="lp").check(allow_unverified=True)


@pytest.mark.parametrize(
    ("dispatch", "slots", "entries"),
    [("static", 288, 1), ("dynamic", 288, 16), ("dynamic", 12, 8), ("dynamic", 3, 2)],
)
def test_tables_have_as_many_entries_as_sglang_has_room_for(dispatch, slots, entries):
    assert replace(PLAIN, dispatch=dispatch).entries(slots) == entries
