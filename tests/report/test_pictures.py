"""The charts are whole files with titles and names, the same for the same replay, or not there."""

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest

from eplb_service.atomic_write import OutputError
from eplb_service.replay.policy import NAMES
from eplb_service.report import pictures
from tests.report.reports import small_replay

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def replayed():
    return small_replay()


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_every_picture_is_a_file_with_a_title_and_always_the_same(replayed, tmp_path):
    pictures.write_pictures(tmp_path / "charts", replayed)
    drawn = pictures.pictures_of(replayed)
    assert {path.name: path.read_text() for path in (tmp_path / "charts").iterdir()} == drawn
    for svg in drawn.values():
        root = ElementTree.fromstring(svg)
        assert root.tag == f"{SVG}svg"
        assert root.find(f"{SVG}title").text in texts(svg)


def test_lines_dots_and_maps_are_named(replayed):
    drawn = pictures.pictures_of(replayed)
    assert {"floor", "hindsight", "left alone", "deepseek", "flashlb", "step"} <= set(texts(drawn["par.svg"]))
    for name in ("moves.svg", "pareto.svg"):
        assert {"deepseek", "flashlb"} <= set(texts(drawn[name]))
        assert "none" not in texts(drawn[name])
    for name in ("ranks.svg", "layers.svg"):
        assert {"left alone", pictures.best_policy(replayed).label, "layer"} <= set(texts(drawn[name]))


def test_several_slots_and_one_policy_have_pictures():
    swept = texts(pictures.pictures_of(small_replay(("flashlb",), slots=(4, 5)))["par.svg"])
    assert {"flashlb, 4 slots", "left alone, 5 slots"} <= set(swept)
    assert "none" in texts(pictures.pictures_of(small_replay(("none",)))["moves.svg"])


def test_the_front_is_what_none_beats_in_both():
    dots = [(0, 2.0), (0.1, 1.5), (0.2, 1.6), (0.3, 1.2)]
    assert list(pictures._front(dots)) == [(0, 2.0), (0.1, 1.5), (0.3, 1.2)]


@pytest.mark.parametrize(("most", "end"), [(1.0, 1.1), (3.4, 3.4)])
def test_a_heat_map_s_scale_holds_every_value(most, end):
    values = np.array([[0.0, 0.5, most, np.nan]])
    figure = pictures._heat_maps("a", "rank", {"one": values / 2, "other": values})
    for axes in figure.axes[:2]:
        norm = axes.images[0].norm
        assert (norm.vmin, norm.vcenter, norm.vmax) == (0.0, 1.0, end)


def test_as_many_policies_as_have_a_name_look_different():
    policies = [SimpleNamespace(label=f"{name}, {slots} slots") for name in NAMES for slots in (8, 9)]
    looks = [tuple(look.values()) for look in pictures._looks(policies).values()]
    assert len(looks) == len(set(looks)) == len(policies)


def test_what_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be made"):
        pictures.write_pictures(tmp_path / "file", small_replay(("none",)))
