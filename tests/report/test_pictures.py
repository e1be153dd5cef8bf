"""Charts are complete SVG files with titles and labels, and identical for identical replays."""

import base64
import math
import re
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from eplb_core.atomic_write import OutputError
from eplb_service.replay.policy import NAMES
from eplb_service.report import pictures, svg
from tests.report.reports import small_replay

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def replayed():
    return small_replay()


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_charts_are_deterministic_files_with_titles(replayed, tmp_path):
    pictures.write_pictures(tmp_path / "charts", replayed)
    drawn = pictures.pictures_of(replayed)
    assert {path.name: path.read_text() for path in (tmp_path / "charts").iterdir()} == drawn
    for picture in drawn.values():
        root = ElementTree.fromstring(picture)
        assert root.tag == f"{SVG}svg"
        assert root.find(f"{SVG}title").text in texts(picture)


def test_lines_dots_and_heat_maps_have_labels(replayed):
    drawn = pictures.pictures_of(replayed)
    assert {"floor", "hindsight", "initial placement", "deepseek", "flashlb", "step"} <= set(
        texts(drawn["par.svg"])
    )
    for name in ("moves.svg", "pareto.svg"):
        assert {"deepseek", "flashlb"} <= set(texts(drawn[name]))
        assert "none" not in texts(drawn[name])
    for name in ("ranks.svg", "layers.svg"):
        assert {"initial placement", pictures.best_policy(replayed).label, "layer"} <= set(texts(drawn[name]))


def test_charts_are_drawn_for_several_slot_counts_and_for_one_policy():
    swept = texts(pictures.pictures_of(small_replay(("flashlb",), slots=(4, 5)))["par.svg"])
    assert {"flashlb, 4 slots", "initial placement, 5 slots"} <= set(swept)
    assert "none" in texts(pictures.pictures_of(small_replay(("none",)))["moves.svg"])


def test_the_front_has_the_dots_that_no_other_dot_dominates():
    dots = [(0, 2.0), (0.1, 1.5), (0.2, 1.6), (0.3, 1.2)]
    assert list(pictures._front(dots)) == [(0, 2.0), (0.1, 1.5), (0.3, 1.2)]


@pytest.mark.parametrize(("hottest", "end"), [(1.0, 1.1), (3.4, 3.4)])
def test_the_heat_map_scale_covers_every_value(hottest, end):
    values = np.array([[0.0, 0.5, hottest, np.nan]])
    assert svg.hottest_of({"half": values / 2, "full": values}) == end
    assert svg.scale_position(np.array([0.0, 0.5, 1.0, end]), end).tolist() == [0.0, 0.25, 0.5, 1.0]


def pixels(drawn):
    """Return the RGB pixels of the first image in an SVG, decoded according to the PNG specification."""
    data = base64.b64decode(re.search(r"data:image/png;base64,([^\"]+)", drawn)[1])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks = {}
    offset = 8
    while offset < len(data):
        length, kind = struct.unpack(">I4s", data[offset : offset + 8])
        content = data[offset + 8 : offset + 8 + length]
        assert struct.unpack(">I", data[offset + 8 + length : offset + 12 + length]) == (
            zlib.crc32(kind + content),
        )
        chunks[kind] = content
        offset = offset + 12 + length
    columns, rows, bits, colour, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (bits, colour) == (8, 2)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(rows, 1 + 3 * columns)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(rows, columns, 3)


def test_heat_map_colours_are_blue_below_and_red_above_the_mean_and_white_for_nan():
    values = np.array([[0.2, 1.0, 2.0], [np.nan, 0.0, 1.5]])
    enlarged = pixels(svg.heat_maps("a", "rank", "layer", {"only": values})).astype(int)
    cell_height = enlarged.shape[0] // 2
    cell_width = enlarged.shape[1] // 3
    assert min(cell_height, cell_width) > 20
    colours = enlarged[::cell_height, ::cell_width]
    assert (colours.repeat(cell_height, axis=0).repeat(cell_width, axis=1) == enlarged).all()
    red = colours[..., 0]
    blue = colours[..., 2]
    assert (red < blue)[[0, 1], [0, 1]].all()
    assert (red > blue)[[0, 1], [2, 2]].all()
    assert colours[0, 1].tolist() == [247, 247, 247]
    assert colours[1, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0.97, 1.52, False, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]),
        (0, 2, True, [0, 1, 2]),
        (0, 0, True, [0]),
        (-3.0, 101.0, False, [0, 20, 40, 60, 80, 100]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low, high, whole, expected):
    assert svg.ticks(low, high, whole=whole) == pytest.approx(expected)


def test_lines_and_dots_are_drawn_at_their_values():
    look = svg.Look("#123456")
    drawn = svg.lines_over_steps("a", "step", [svg.Line("line", look, [0, 10], [1.0, 2.0])], 20)
    coordinates = ElementTree.fromstring(drawn).findall(f"{SVG}polyline")[-1].get("points").split()
    points = [tuple(map(float, point.split(","))) for point in coordinates]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert points[0][1] == points[1][1] > points[2][1] == points[3][1]
    flat = svg.lines_over_steps("a", "step", [svg.Line("line", look, [0], [math.nan])], 0)
    assert "nan" not in flat
    dots = [svg.Dot(name, svg.Look("#123456", "", name), 0.1, 1.0) for name in svg.MARKERS]
    assert "nan" not in svg.dots_and_front("a & b", "x", "y", dots, [(0.1, 1.0)])


def test_all_named_policies_with_two_slot_counts_look_different():
    policies = [SimpleNamespace(label=f"{name}, {slots} slots") for name in NAMES for slots in (8, 9)]
    looks = list(pictures._looks(policies).values())
    assert len(looks) == len(set(looks)) == len(policies)


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be created"):
        pictures.write_pictures(tmp_path / "file", small_replay(("none",)))
