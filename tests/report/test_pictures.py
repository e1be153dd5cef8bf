"""The charts are also pictures: whole files with titles, legends and colours of their own, or not there."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from eplb_service.atomic_write import OutputError
from eplb_service.report import charts, pictures
from tests.report.reports import small_replay

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pictures") / "charts"
    pictures.write_pictures(made, small_replay())
    return made


@pytest.mark.parametrize("name", pictures.NAMES)
def test_a_picture_is_whole_and_needs_nothing_else(folder, name):
    text = (folder / name).read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title").text
    assert float(root.get("width")) > 600
    assert "var(" not in text
    assert not re.search(r"url|@import|href", text)


def test_every_chart_has_its_file(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted(pictures.NAMES)


def test_lines_are_named(folder):
    text = [element.text for element in ElementTree.parse(folder / "par.svg").iter(f"{SVG}text")]
    assert {"floor", "hindsight", "none", "deepseek", "flashlb", "step", "PAR, mean over layers"} <= set(text)


def test_a_heat_map_s_scale_holds_every_value():
    ratio_LR = np.array([[0.0, 0.5, 3.4, 1.0]])
    assert charts._hottest_of(ratio_LR, ratio_LR / 2) == 4.0
    assert charts._hottest_of(np.ones((2, 2))) == 2.0
    assert charts._hottest_of(np.full((1, 1), 100.0)) == 100.0
    drawn = charts._heat_map("a", "b", ratio_LR, "layer", "rank", 4.0)
    assert re.findall(r"--h(\w\d+)", drawn) == ["c12", "c6", "w0", "w10"]
    assert ">4x</text>" in charts._colour_bar(4.0)


def test_what_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be made"):
        pictures.write_pictures(tmp_path / "file", small_replay(("none",)))
