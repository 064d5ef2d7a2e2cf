"""What a forked child finds. Unlike a new process it has imported everything, which takes seconds."""

from __future__ import annotations

import os
import sys
import traceback
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


def command_in_a_fork(command: Callable[[], int]) -> tuple[int, bytes]:
    """Return the exit status of a forked child that runs a command, and what it wrote to standard output."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = -1
        try:
            os.dup2(write, 1)
            sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
            status = command()
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), found
