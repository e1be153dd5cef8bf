"""A lease that is a locked file: for services of one host, or of hosts that share a file system with locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from eplb_service.control.server.lease.interface import LeaseError
from eplb_service.wire.fields import LAST_VERSION

_LONGEST_RECORD = 64


class FileLease:
    """Held as long as this process lives and does not give it back: the kernel lets go of a dead holder's lock at once.

    Parameters
    ----------
    path
        File to lock, made where there is none. It holds the highest leader term so far, in decimal.
    """

    def __init__(self, path: Path) -> None:
        self.described = f"file {path}"
        self._path = path
        self._file: int | None = None

    def attempt(self) -> bool:
        """As ``Lease.attempt``; what is held needs no renewal, unless somebody has replaced the file."""
        if self._file is not None:
            return self._is_the_same(self._file)
        file = self._opened()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except OSError as error:
            os.close(file)
            raise LeaseError(f"cannot lock {self._path}: {error.strerror}") from error
        self._file = file
        return True

    def highest_term(self) -> int:
        """As ``Lease.highest_term``; raises ``LeaseError`` where the file is something else."""
        assert self._file is not None
        record = os.pread(self._file, _LONGEST_RECORD, 0).strip()
        if not record:
            return 0
        if not record.isdigit() or int(record) >= LAST_VERSION:
            raise LeaseError(f"{self._path} is no lease: it holds no leader term; name another file")
        return int(record)

    def announce(self, term: int) -> None:
        """As ``Lease.announce``."""
        assert self._file is not None
        record = f"{term:<{_LONGEST_RECORD - 1}}\n".encode()
        try:
            os.pwrite(self._file, record, 0)
            os.fsync(self._file)
        except OSError as error:
            raise LeaseError(f"cannot write {self._path}: {error.strerror}") from error

    def give_back(self) -> None:
        """As ``Lease.give_back``."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _opened(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LeaseError(f"cannot open {self._path}: {error.strerror}") from error

    def _is_the_same(self, file: int) -> bool:
        try:
            named = self._path.stat()
        except OSError:
            return False
        return os.path.samestat(named, os.fstat(file))
