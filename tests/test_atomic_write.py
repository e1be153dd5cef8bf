"""A file is written whole or not at all, and what cannot be written is reported before the work begins."""

import os
import stat
from pathlib import Path

import pytest

from eplb_core.atomic_write import OutputError, check_output, write_atomically


def test_writes_new_and_replaces_old(tmp_path):
    path = tmp_path / "out.npz"
    write_atomically(path, b"first")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_those_of_any_new_file_and_kept_on_replacing(tmp_path):
    plain, ours = tmp_path / "plain.json", tmp_path / "ours.json"
    plain.write_bytes(b"")
    write_atomically(ours, b"")
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    ours.chmod(0o640)
    write_atomically(ours, b"again")
    assert stat.S_IMODE(ours.stat().st_mode) == 0o640


def test_a_link_is_written_through(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failure):
    path = tmp_path / "out.json"
    path.write_bytes(b"old")

    def fail(_):
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError if isinstance(failure, OSError) else KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.csv", "must end in .npz or .json"),
        ("out", "must end in"),
        ("absent/out.npz", "does not exist"),
        ("folder.npz", "not a regular file"),
    ],
)
def test_refuses_beforehand(tmp_path, name, message):
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(OutputError, match=message):
        check_output(tmp_path / name, (".npz", ".json"))


def test_admits_what_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_output(Path("out.npz"), (".npz",))
    write_atomically(Path("out.npz"), b"")
    check_output(Path("out.npz"), (".npz",))
