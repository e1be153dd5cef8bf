"""Lock file, next to the store, that prevents two services from using the store at the same time."""

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
def lock_store(path: str, lease: str | None = None) -> Iterator[None]:
    """Lock the store at ``path`` until the context exits. The kernel releases the lock if the process dies.

    Services with the same ``lease`` may share a store: only the leader uses it, but its predecessor may still be
    closing it. Raises ``StoreError`` if another service uses the store; the error message names its process.
    """
    if path == MEMORY:
        yield
        return
    store = Path(path).resolve()
    if not store.parent.is_dir():
        raise StoreError(f"cannot create the store {path!r}: its directory does not exist")
    lock = store.with_name(f"{store.name}-lock")
    try:
        # Lock a separate file: closing the store's own file would release the locks that SQLite holds on it.
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
            record = os.pread(file, _MAX_RECORD_BYTES, 0).decode("utf-8", "replace")
            user, _, user_lease = record.partition("\n")
            if lease is None or user_lease.strip() != lease or not _attempt(file, lock, fcntl.LOCK_SH):
                raise StoreError(
                    f"the store {path!r} is in use by process {user}; stop that service, specify another file with "
                    "--store, or give both services the same --lease"
                )
        yield
    finally:
        os.close(file)


def _attempt(file: int, lock: Path, kind: int) -> bool:
    """Try to acquire the lock; return True on success.

    Raises ``StoreError`` if the file system does not support locks.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StoreError(
            f"cannot lock {lock}: {error.strerror}; choose a store on another file system with --store"
        ) from error
    return True
