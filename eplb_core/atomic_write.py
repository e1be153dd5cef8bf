"""Write a file whole or not at all, and say beforehand when it cannot be written."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


class OutputError(ValueError):
    """A path that nothing can be written to; the message says why."""


def check_output(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise ``OutputError`` where ``path`` ends in none of ``suffixes`` or cannot be written.

    Called before long work begins, so that its result is not lost for a misspelt path.
    """
    if path.suffix not in suffixes:
        raise OutputError(f"{path}: the name must end in {' or '.join(suffixes)}, which says the format")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}: exists and is not a plain file")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise OutputError(f"{path}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: no permission to write into {folder}")


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace ``path`` by ``data`` in one step: readers see the old file or the new one, never a part.

    A durable write takes some milliseconds longer. A write that is not durable may be lost in a power cut.

    Raises
    ------
    OutputError
        Where the disk refuses; nothing is left behind then.
    """
    target = path.resolve()
    # Unlike the files of tempfile, one that is simply opened gets the mode that the process gives to new files.
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
