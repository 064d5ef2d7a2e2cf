"""A file of compiled kernels: what one run of ``bench.gpu`` compiled, for the next run on a machine like it.

A machine that is lent for minutes starts without Triton's cache, and compiling takes longer than most measurements. The
file has what a launch loads, and nothing that only people read. Triton finds a kernel by a hash of its source, of the
versions of Triton and CUDA, and of the target, so a file made elsewhere, or before a change, does no harm.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

from triton import knobs

_NOT_LOADED = {".ttir", ".ttgir", ".llir", ".source"}
_GROUP = "__grp__"  # files of this prefix name the files of a kernel, by their whole paths


def cache_folder() -> Path:
    """Return the folder of Triton's cache."""
    return Path(knobs.cache.dir)


def unpack(file: Path) -> int:
    """Put the kernels of a file into the cache; return how many there are."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as packed:
        packed.extractall(folder, filter="data")
    groups = list(folder.glob(f"*/{_GROUP}*"))
    for group in groups:
        paths = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.parent / name) for name in paths}}))
    return len(groups)


def pack(file: Path) -> int:
    """Write the kernels in the cache to a file, compressed, in place of an earlier one; return its bytes."""
    folder, beside = cache_folder(), file.with_suffix(".new")
    with tarfile.open(beside, "w:xz", preset=2) as packed:
        for path in sorted(folder.glob("*/*")):
            if path.is_file() and path.suffix not in _NOT_LOADED:
                packed.add(path, str(path.relative_to(folder)))
    os.replace(beside, file)
    return file.stat().st_size
