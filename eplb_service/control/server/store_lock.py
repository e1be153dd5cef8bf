"""A lock beside the store's file: two services do not use one store at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from eplb_service.control.server.store_file import MEMORY, StoreError

_MAX_RECORD_BYTES = 1 << 12


@contextlib.contextmanager
def locked_store(path: str, lease: str | None = None) -> Iterator[None]:
    """Keep other services from the store at ``path`` as long as the context lasts; the kernel frees a dead one's lock.

    Services with the same ``lease`` share a store: one of them leads, and the one before may still be closing it.
    Raises ``StoreError``, with the process that uses the store, if it is in use.
    """
    if path == MEMORY:
        yield
        return
    store = Path(path).resolve()
    if not store.parent.is_dir():
        raise StoreError(f"cannot make the store {path!r}: its directory does not exist")
    lock = store.with_name(f"{store.name}-lock")
    try:
        # Not the store's own file: closing it would release the locks that SQLite has on it.
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"cannot lock the store {path!r}: {lock}: {error.strerror}") from error
    try:
        if _attempt(file, lock, fcntl.LOCK_EX):
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()} on {socket.gethostname()}\n{lease or ''}\n".encode(), 0)
            if lease is not None:
                _attempt(file, lock, fcntl.LOCK_SH)
        else:
            user, _, its_lease = (
                os.pread(file, _MAX_RECORD_BYTES, 0).decode("utf-8", "replace").partition("\n")
            )
            if lease is None or its_lease.strip() != lease or not _attempt(file, lock, fcntl.LOCK_SH):
                raise StoreError(
                    f"the store {path!r} is in use by process {user}; stop that service, name another file with "
                    "--store, or let both wait for the same --lease"
                )
        yield
    finally:
        os.close(file)


def _attempt(file: int, lock: Path, kind: int) -> bool:
    """Return whether the lock could be acquired; raises ``StoreError`` if the file system has none."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StoreError(
            f"cannot lock {lock}: {error.strerror}; name a store on another file system"
        ) from error
    return True
