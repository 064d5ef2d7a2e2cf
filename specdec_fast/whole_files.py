"""Files that appear whole or not at all: a full disk, an interrupt or a kill leaves what was there before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from specdec_fast.errors import OutputError


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield the path of an unfinished file beside ``path``, whose place it takes when the block has ended.

    If the block raises, the unfinished file is removed. Only a process that is killed leaves one; it is never read, and
    the next call writes over it. Raises OutputError if the file cannot be written, as when the disk is full.
    """
    unfinished = path.with_suffix(".unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    except OutputError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: of torch.save
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OutputError(
            f"cannot write {str(path)!r}: {reason}. If its disk is full, free space, then repeat the call; of a "
            "training, --resume goes on from its last checkpoint."
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
