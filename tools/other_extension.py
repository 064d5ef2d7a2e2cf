"""Pytest plugin of ``tools/sanitize.py`` and ``tools/compilers.py``: the tests call the extension in a folder.

SPECDEC_OTHER_EXTENSION is that folder. It refuses to go on with any other, so that a green run says something. The ops
get SPECDEC_OTHER_THREADS threads. The extension must contain SPECDEC_OTHER_CONTAINS, such as a sanitizer's function.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch  # before the extension, which shares its OpenMP runtime

import specdec_fast

FOLDER = Path(os.environ["SPECDEC_OTHER_EXTENSION"]).resolve()
THREADS = int(os.environ.get("SPECDEC_OTHER_THREADS", "1"))
CONTAINS = os.environ.get("SPECDEC_OTHER_CONTAINS", "")

if "specdec_fast._C" in sys.modules:
    sys.exit("the extension was imported before the other one could take its place")
specdec_fast.__path__.insert(0, str(FOLDER))  # submodules are looked up here first

from specdec_fast import _C  # noqa: E402

if Path(_C.__file__).parent != FOLDER or CONTAINS.encode() not in Path(_C.__file__).read_bytes():
    sys.exit(f"{_C.__file__} is not the extension in {FOLDER}, or does not contain '{CONTAINS}'")


def pytest_report_header() -> str:
    """Say what is tested."""
    return f"extension: {_C.__file__}, {THREADS} threads"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Set the number of threads after the fixtures, which set one."""
    torch.set_num_threads(THREADS)
