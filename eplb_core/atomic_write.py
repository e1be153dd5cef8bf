"""Atomic file writes, and checks of output paths before long work begins."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


class OutputError(ValueError):
    """An output path cannot be written to. The message gives the reason."""


def check_output(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise ``OutputError`` if the suffix of ``path`` is not in ``suffixes``, or the file cannot be written.

    Call it before long work, so that a misspelt path does not lose the result.
    """
    if path.suffix not in suffixes:
        raise OutputError(
            f"{path}: the name must end in {' or '.join(suffixes)}; the suffix selects the format"
        )
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}: exists and is not a regular file; choose another path")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise OutputError(f"{path}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: no write permission for {folder}; choose another folder")


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace the content of ``path`` in one step, so that readers see either the old file or the new one.

    Parameters
    ----------
    path
        File to write. A symbolic link is followed.
    data
        New content.
    durable
        True to flush the file to disk, which takes a few milliseconds. If False, a power cut may lose the new content.

    Raises
    ------
    OutputError
        If the file cannot be written. The old file is then unchanged, and no temporary file remains.
    """
    target = path.resolve()
    # ``tempfile`` creates files with mode 600. A file that is opened here gets the process's default mode.
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with scratch.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, scratch)
        scratch.replace(target)
    except BaseException as error:
        scratch.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
        raise
