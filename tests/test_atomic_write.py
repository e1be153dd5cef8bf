"""Tests of atomic writes: complete files or none, and invalid paths reported before the work begins."""

import os
import stat
from pathlib import Path

import pytest

from eplb_core.atomic_write import OutputError, check_output, write_atomically


def test_a_file_is_created_or_replaced(tmp_path):
    path = tmp_path / "out.npz"
    write_atomically(path, b"first")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_default_permissions_and_a_replaced_one_keeps_its_own(tmp_path):
    ordinary = tmp_path / "plain.json"
    path = tmp_path / "ours.json"
    ordinary.write_bytes(b"")
    write_atomically(path, b"")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
    path.chmod(0o640)
    write_atomically(path, b"again")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_symbolic_link_is_followed(tmp_path):
    target = tmp_path / "target.json"
    link = tmp_path / "link.json"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path, monkeypatch, failure):
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
def test_an_invalid_output_path_is_rejected_before_anything_is_written(tmp_path, name, message):
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(OutputError, match=message):
        check_output(tmp_path / name, (".npz", ".json"))


def test_a_valid_output_path_is_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_output(Path("out.npz"), (".npz",))
    write_atomically(Path("out.npz"), b"")
    check_output(Path("out.npz"), (".npz",))
