"""What a forked child finds."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_a_fork(action: Callable[[], object]) -> str:
    """Return what a forked child raised, or the result, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = repr(action())
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(write, found.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found
