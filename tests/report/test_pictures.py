"""The charts are also pictures, whole or not there."""

import pytest

from eplb_service.atomic_write import OutputError
from eplb_service.report import pictures
from tests.report.reports import small_replay


def test_one_png_a_chart(tmp_path):
    pytest.importorskip("matplotlib")
    pictures.write_pictures(tmp_path / "charts", small_replay(("none", "flashlb")))
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == sorted(pictures.NAMES)
    for path in (tmp_path / "charts").iterdir():
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert data.endswith(b"IEND\xaeB`\x82")
        assert int.from_bytes(data[16:20], "big") == 1500


def test_what_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    replayed = small_replay(("none",))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(OutputError, match=r"pip install 'eplb-service\[report\]'"):
        pictures.write_pictures(tmp_path / "charts", replayed)
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    with pytest.raises(OutputError, match="cannot be made"):
        pictures.write_pictures(tmp_path / "file", replayed)
