"""Files that are no store of this release are refused or set aside, and nothing of theirs is lost."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from eplb_service.control.server.store import Store, StoredDeployment, StoreError
from tests.control.fake_group import first_placement, live_of

LIVE = live_of(first_placement())


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, but long enough to be taken for one" * 100)
    with pytest.raises(StoreError, match="file is not a database"):
        Store(str(text))
    other = tmp_path / "other"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE things (id)")
    database.close()
    with pytest.raises(StoreError, match="database of something else"):
        Store(str(other))
    with pytest.raises(StoreError, match="directory does not exist"):
        Store(str(tmp_path / "nowhere" / "file"))


def test_a_store_of_a_later_release_is_refused(path: str) -> None:
    Store(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreError, match="schema version 99"):
        Store(path)


@pytest.mark.parametrize("damage", ["truncated", "middle", "magic"])
def test_a_damaged_store_is_set_aside_and_begun_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.sqlite3"
    store = Store(str(path))
    term = store.leader_term
    for number in range(200):
        store.save_deployment(StoredDeployment(f"deployment-{number}", last_decision="x" * 500))
    store.close()
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "middle":
        content[4096 : len(content) - 4096] = bytes(len(content) - 2 * 4096)
    else:
        content[:16] = bytes(16)
    path.write_bytes(content)
    again = Store(str(path))
    assert again.deployments() == []
    assert again.leader_term > term >> 20 << 20
    again.close()
    (aside,) = tmp_path.glob("state.sqlite3.damaged-*")
    assert aside.read_bytes() == content


@pytest.mark.parametrize("part", [slice(0, 100), slice(100, None), slice(0, 0)])
def test_a_first_layout_that_is_damaged_is_said(path: str, part: slice) -> None:
    store = Store(path)
    store.save_first_layout("decode", "first", LIVE.serving)
    store.close()
    with sqlite3.connect(path) as database:
        (content,) = database.execute("SELECT layout FROM first_layouts").fetchone()
        database.execute("UPDATE first_layouts SET layout = ?", (content[part],))
    database.close()
    with pytest.raises(ValueError, match="a stored layout is damaged"):
        Store(path).first_layout("decode")
