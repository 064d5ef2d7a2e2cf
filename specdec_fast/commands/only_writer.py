"""One command writes a file at a time: a lock that the operating system ends with the process that holds it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path

from specdec_fast.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def only_writer(path: Path, shown: Path | None = None) -> Iterator[None]:
    """Refuse other commands that write the same file while the block runs; messages name ``shown`` in its place.

    The file itself is locked, so that no lock is left by a process that is killed. It is made if it does not exist, and
    removed if it is still empty at the end. A pipe or a device is not locked. Where there are no locks, a message says
    so. Raises ConfigError if another process writes the file, or it cannot be written.
    """
    existed = path.exists()
    if existed and not path.is_file():
        yield
        return
    file = _locked(path, shown or path)
    try:
        yield
    finally:
        if not existed and path.is_file() and not path.stat().st_size:
            path.resolve().unlink()  # a link stays, whose file did not exist
        file.close()


def _locked(path: Path, shown: Path) -> BufferedWriter:
    while True:
        try:
            file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"cannot write {str(shown)!r}: {error.strerror}.") from None
        if not _lock(file, shown) or _is_at(path, file):
            return file
        file.close()  # the command that held the lock has removed or replaced this file


def _lock(file: BufferedWriter, shown: Path) -> bool:
    reason: str | None = "no such call in this system"
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"another command is writing {str(shown)!r}; wait until it has ended, or choose another output."
        ) from None
    except OSError as error:
        reason = error.strerror
    print(
        f"specdec-fast: {str(shown)!r} cannot be locked ({reason}); start no other command that writes it.",
        file=sys.stderr,
    )
    return False


def _is_at(path: Path, file: BufferedWriter) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
