"""Locks by which processes share the work on one store, of any launcher and machine that shares its file system."""

import errno
import fcntl
import os
from pathlib import Path

CLAIMS = ".claims"
JOB, MANIFEST_CLAIM = -2, -1
_FIRST_BYTE = 2


class Claims:
    """POSIX locks on bytes of a file in the store: one byte a shard, one for the manifest, one for the job.

    They end with their process, however that ends, so none goes stale. Taking one that this process holds succeeds
    again. Use as a context manager; a process may hold only one object of a folder at a time, as closing any of them
    drops its locks. Raises ValueError where the folder cannot be written to or its file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CLAIMS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(
                f"store={folder} cannot be written to ({error.strerror}): choose another store="
            ) from error

    def __enter__(self) -> "Claims":
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._file)

    def take(self, place: int) -> bool:
        """Whether this process alone now holds `place`: a shard's index, MANIFEST_CLAIM or JOB."""
        return self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, place)

    def release(self, place: int) -> None:
        self._lock(fcntl.LOCK_UN, place)

    def join(self, job: str) -> None:
        """Work on the store from now on, beside other processes of the same job, which `job` names in some text.

        Raises ValueError where others do another job there now; one that is over does not matter.
        """
        if self.take(JOB):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, job.encode(), 0)
        self.wait_for_job()
        if os.pread(self._file, 4096, 0).decode() != job:
            raise ValueError(
                f"store={self._path.parent}: processes with other responses or options work on it now; wait for them "
                "or choose another store="
            )

    def wait_for_job(self) -> None:
        """Share JOB, after whichever process holds it alone."""
        self._lock(fcntl.LOCK_SH, JOB)

    def is_current(self) -> bool:
        """Whether the file still has its name: the first process that publishes removes it."""
        return self._path.is_file() and self._path.stat().st_ino == os.fstat(self._file).st_ino

    def _lock(self, operation: int, place: int) -> bool:
        try:
            fcntl.lockf(self._file, operation, 1, place + _FIRST_BYTE)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise ValueError(
                f"store={self._path.parent}: its file system has no POSIX locks ({error.strerror}), by which processes "
                "share the work: choose another store="
            ) from error
        return True
