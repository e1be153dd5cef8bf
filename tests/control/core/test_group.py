"""What all ranks serve may be put together beside the event loop; it is used only where they are still the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.group import Assembled
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.wire.agent import Hello, decode_hello
from tests.control.core.story import Story, swap_of
from tests.control.fake_group import RANKS, first_placement, hello_of, live_of


def hellos() -> list[Hello]:
    live = live_of(first_placement())
    return [decode_hello(hello_of(live, rank)) for rank in range(RANKS)]


def all_but_the_last() -> tuple[Story, list[Hello]]:
    story, said = Story(), hellos()
    for hello in said[:-1]:
        story.deployment.hello(hello)
    return story, said


def assembled(story: Story, last: Hello) -> Assembled:
    assert story.deployment.group is not None
    return story.deployment.group.assembled(last)


def test_it_is_of_the_ranks_that_wait_and_the_one_that_comes() -> None:
    story, said = all_but_the_last()
    group = story.deployment.group
    assert group is not None
    assert group.is_completed_by(said[-1])
    assert not group.is_completed_by(said[0])
    assert not group.is_completed_by(replace(said[-1], group_id="second"))
    story.deployment.hello(said[-1])
    assert story.deployment.group is not None
    assert not story.deployment.group.is_completed_by(said[-1])


def test_what_was_put_together_is_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    story, said = all_but_the_last()
    found = assembled(story, said[-1])
    monkeypatch.setattr(LivePlacement, "assembled", lambda _: pytest.fail("put together once more"))
    story.deployment.hello(said[-1], found)
    assert story.deployment.live is found[1]


def test_it_is_made_again_where_a_rank_has_come_again_meanwhile() -> None:
    story, said = all_but_the_last()
    found = assembled(story, said[-1])
    story.leaves(0)
    story.deployment.hello(hellos()[0])
    story.deployment.hello(said[-1], found)
    assert story.deployment.live is not None
    assert story.deployment.live is not found[1]


def test_it_does_not_make_up_for_a_rank_that_has_left() -> None:
    story, said = all_but_the_last()
    found = assembled(story, said[-1])
    story.leaves(1)
    story.deployment.hello(said[-1], found)
    assert story.deployment.live is None


def test_a_contradiction_is_reported_as_before() -> None:
    story, said = all_but_the_last()
    wrong = replace(said[-1], slots_LS=said[0].slots_LS)
    with pytest.raises(ConflictError, match=r"do not make a placement|have the digest"):
        story.deployment.hello(wrong, assembled(story, wrong))


def test_a_layer_that_switches_leaves_the_other_tables_where_they_are() -> None:
    before = live_of(first_placement())
    update = swap_of(before, 1)
    after = before.with_layer(1, update.phy2log_RS, update.log2phy_RE)
    assert after.tables_L[0] is before.tables_L[0]
    assert after.tables_L[2] is before.tables_L[2]
    np.testing.assert_array_equal(after.log2phy_RLE[:, 1], update.log2phy_RE)
    np.testing.assert_array_equal(after.log2phy_RLE[:, [0, 2]], before.log2phy_RLE[:, [0, 2]])


def test_a_rank_that_returns_with_other_experts_or_another_table_is_refused() -> None:
    story = Story()
    story.joins()
    story.leaves(0)
    said = hellos()[0]
    for changes, says in (
        ({"slots_LS": said.slots_LS[:, ::-1]}, "holds other experts in layer 0"),
        ({"log2phy_LE": said.log2phy_LE + 1}, "has another log2phy in layer 0"),
    ):
        with pytest.raises(ConflictError, match=says):
            story.deployment.hello(replace(said, **changes))
    story.deployment.hello(said)
    assert story.deployment.obstacle() == "no heat has been gathered yet"
