"""The layout of all ranks can be assembled outside the event loop, and is used only if the group has not changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_core.wire.agent import Hello, decode_hello
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.group import AssembledLayout
from tests.control.core.story import Story, swap_of
from tests.control.fake_group import RANKS, first_placement, hello_of, live_of


def hellos() -> list[Hello]:
    live = live_of(first_placement())
    return [decode_hello(hello_of(live, rank)) for rank in range(RANKS)]


LAST = hellos()[-1]


@pytest.fixture
def story() -> Story:
    """Return a story in which every rank except the last one has sent a Hello."""
    story = Story()
    for hello in hellos()[:-1]:
        story.deployment.hello(hello)
    return story


def assembled(story: Story, last: Hello) -> AssembledLayout:
    assert story.deployment.group is not None
    return story.deployment.group.assembled(last)


def test_only_the_last_missing_rank_of_a_group_completes_the_group(story: Story) -> None:
    group = story.deployment.group
    assert group is not None
    assert group.is_completed_by(LAST)
    assert not group.is_completed_by(hellos()[0])
    assert not group.is_completed_by(replace(LAST, group_id="second"))
    story.deployment.hello(LAST)
    assert story.deployment.group is not None
    assert not story.deployment.group.is_completed_by(LAST)


def test_the_assembled_layout_is_used_without_assembling_it_again(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = assembled(story, LAST)
    monkeypatch.setattr(DeployedLayout, "assembled", lambda _: pytest.fail("the layout was assembled twice"))
    story.deployment.hello(LAST, layout)
    assert story.deployment.live is layout[1]


@pytest.mark.parametrize("returns", [True, False])
def test_an_assembled_layout_is_dropped_if_a_rank_has_left_since(story: Story, returns: bool) -> None:
    layout = assembled(story, LAST)
    story.leaves(0)
    if returns:
        story.deployment.hello(hellos()[0])
    story.deployment.hello(LAST, layout)
    assert (story.deployment.live is not None) is returns
    assert story.deployment.live is not layout[1]


def test_an_invalid_last_hello_is_rejected_even_if_its_layout_was_assembled_in_advance(story: Story) -> None:
    wrong = replace(LAST, slots_LS=hellos()[0].slots_LS)
    with pytest.raises(ConflictError, match=r"do not form a valid placement|have the digest"):
        story.deployment.hello(wrong, assembled(story, wrong))


def test_committing_a_layer_shares_the_tables_of_all_other_layers() -> None:
    before = live_of(first_placement())
    update = swap_of(before, 1)
    after = before.with_layer(1, update.phy2log_RS, update.log2phy_RE)
    assert after.tables_L[0] is before.tables_L[0]
    assert after.tables_L[2] is before.tables_L[2]
    np.testing.assert_array_equal(after.log2phy_RLE[:, 1], update.log2phy_RE)
    np.testing.assert_array_equal(after.log2phy_RLE[:, [0, 2]], before.log2phy_RLE[:, [0, 2]])


def test_a_rank_that_returns_with_different_experts_or_tables_is_rejected() -> None:
    story = Story()
    story.joins()
    story.leaves(0)
    hello = hellos()[0]
    for changes, message in (
        ({"slots_LS": hello.slots_LS[:, ::-1]}, "holds different experts in layer 0"),
        ({"log2phy_LE": hello.log2phy_LE + 1}, "has a different log2phy in layer 0"),
    ):
        with pytest.raises(ConflictError, match=message):
            story.deployment.hello(replace(hello, **changes))
    story.deployment.hello(hello)
    assert story.deployment.obstacle() == "no heat has been gathered yet"


def test_ranks_with_different_layer_epochs_are_rejected(story: Story) -> None:
    """If such ranks were accepted, heat would be read under placements of different epochs."""
    epochs = (*LAST.layer_epochs[:-1], LAST.layer_epochs[-1] + 1)
    with pytest.raises(ConflictError, match="report different layer epochs"):
        story.deployment.hello(replace(LAST, layer_epochs=epochs))


@pytest.mark.parametrize(
    ("group_id", "width"), [(LAST.group_id, 7), ("second", 7), ("second", LAST.shape.width)]
)
def test_a_rank_with_a_different_shape_or_group_id_does_not_displace_a_member(story, group_id, width) -> None:
    hello = replace(LAST, group_id=group_id, shape=replace(LAST.shape, width=width))
    with pytest.raises(ConflictError, match=r"differs in shape|does not belong to the group"):
        story.deployment.hello(hello)
    story.deployment.hello(LAST)
    assert story.deployment.obstacle() == "no heat has been gathered yet"
