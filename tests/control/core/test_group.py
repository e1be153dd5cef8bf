"""What all ranks serve may be put together beside the event loop; it is used only where they are still the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_core.wire.agent import Hello, decode_hello
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.group import Assembled
from tests.control.core.story import Story, swap_of
from tests.control.fake_group import RANKS, first_placement, hello_of, live_of


def hellos() -> list[Hello]:
    live = live_of(first_placement())
    return [decode_hello(hello_of(live, rank)) for rank in range(RANKS)]


LAST = hellos()[-1]


@pytest.fixture
def story() -> Story:
    """All ranks but the last have said Hello."""
    made = Story()
    for hello in hellos()[:-1]:
        made.deployment.hello(hello)
    return made


def assembled(story: Story, last: Hello) -> Assembled:
    assert story.deployment.group is not None
    return story.deployment.group.assembled(last)


def test_it_is_of_the_ranks_that_wait_and_the_one_that_comes(story: Story) -> None:
    group = story.deployment.group
    assert group is not None
    assert group.is_completed_by(LAST)
    assert not group.is_completed_by(hellos()[0])
    assert not group.is_completed_by(replace(LAST, group_id="second"))
    story.deployment.hello(LAST)
    assert story.deployment.group is not None
    assert not story.deployment.group.is_completed_by(LAST)


def test_what_was_put_together_is_what_serves(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    found = assembled(story, LAST)
    monkeypatch.setattr(DeployedLayout, "assembled", lambda _: pytest.fail("put together once more"))
    story.deployment.hello(LAST, found)
    assert story.deployment.live is found[1]


@pytest.mark.parametrize("returns", [True, False])
def test_it_is_made_again_or_not_used_where_a_rank_has_gone_meanwhile(story: Story, returns: bool) -> None:
    found = assembled(story, LAST)
    story.leaves(0)
    if returns:
        story.deployment.hello(hellos()[0])
    story.deployment.hello(LAST, found)
    assert (story.deployment.live is not None) is returns
    assert story.deployment.live is not found[1]


def test_a_contradiction_is_reported_as_before(story: Story) -> None:
    wrong = replace(LAST, slots_LS=hellos()[0].slots_LS)
    with pytest.raises(ConflictError, match=r"do not form a valid placement|have the digest"):
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
        ({"slots_LS": said.slots_LS[:, ::-1]}, "holds different experts in layer 0"),
        ({"log2phy_LE": said.log2phy_LE + 1}, "has a different log2phy in layer 0"),
    ):
        with pytest.raises(ConflictError, match=says):
            story.deployment.hello(replace(said, **changes))
    story.deployment.hello(said)
    assert story.deployment.obstacle() == "no heat has been gathered yet"


def test_ranks_that_say_different_epochs_of_their_layers_are_no_group(story: Story) -> None:
    """Of one version they would read each other's heat under placements of different epochs."""
    epochs = (*LAST.layer_epochs[:-1], LAST.layer_epochs[-1] + 1)
    with pytest.raises(ConflictError, match="report different layer epochs"):
        story.deployment.hello(replace(LAST, layer_epochs=epochs))


@pytest.mark.parametrize(
    ("group_id", "width"), [(LAST.group_id, 7), ("second", 7), ("second", LAST.shape.width)]
)
def test_a_rank_of_another_shape_or_forming_takes_nobodys_place(story, group_id, width) -> None:
    other = replace(LAST, group_id=group_id, shape=replace(LAST.shape, width=width))
    with pytest.raises(ConflictError, match=r"different shape|does not belong to the group"):
        story.deployment.hello(other)
    story.deployment.hello(LAST)
    assert story.deployment.obstacle() == "no heat has been gathered yet"
