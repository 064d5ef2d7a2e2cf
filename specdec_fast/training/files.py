"""Files that appear whole or not at all: a full disk, an interrupt or a kill leaves what was there before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specdec_fast.errors import OutputError

_CONFIG = "config.json"


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield the path of an unfinished file beside ``path``, whose place it takes when the block has ended.

    If the block raises, the unfinished file is removed. Only a process that is killed leaves one; it is never read, and
    the next call writes over it.

    Raises:
        OutputError: the file cannot be written, because the disk is full, for example.

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


def write_drafter(folder: Path, name: str, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write a drafter's checkpoint: its weights, and ``config.json``, without which no drafter loads.

    Both files are written before either takes its place. There is no ``config.json`` while the weights are replaced, so
    a process that is killed there leaves no drafter instead of new weights with an old configuration.

    Args:
        folder: exists.
        name: of the file of the weights.
        weights: by the names of checkpoints.
        config: for ``config.json``.

    Raises:
        OutputError: a file cannot be written.

    """
    with replaced(folder / _CONFIG) as config_path, replaced(folder / name) as weights_path:  # the last one is first
        config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(weights, weights_path, metadata={"format": "pt"})
        weights_path.chmod(0o644)  # safetensors writes 0600
        (folder / _CONFIG).unlink(missing_ok=True)
