"""Triton's compiler, which the tests' own processes lack: Triton's interpreter is in its place there.

``Compiler`` starts this file as a process that imports what is slow once; each script runs in a child of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from typing import Any

from support.source_tree import ROOT


class Compiler:
    """A process with the compiler, and with a compilation cache of its own that all scripts share."""

    def __init__(self, cache: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": str(ROOT / "tests"), "TRITON_CACHE_DIR": cache}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "support.compiler"],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, script: str, *arguments: str) -> str:
        """Run a script with ``sys.argv[1:]`` in the root of the checkout; return what it prints.

        Raises:
            AssertionError: it failed; the message is what it wrote to standard error.

        """
        status, printed, errors = self.result(script, *arguments)
        assert status == 0, errors
        return printed

    def result(self, script: str, *arguments: str) -> tuple[int, str, str]:
        """Return a script's exit status, and what it wrote to standard output and to standard error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([script, *arguments]), file=self._process.stdin, flush=True)
        status, printed, errors = json.loads(self._process.stdout.readline())
        return status, printed, errors

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _serve() -> None:
    import torch

    from bench import aot  # noqa: F401
    from bench.gpu_ import launches  # noqa: F401
    from support import device_programs  # noqa: F401

    torch.set_num_threads(1)  # a forked process has no pool of threads
    for line in sys.stdin:
        script, *arguments = json.loads(line)
        with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                os.dup2(printed.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                os._exit(_status_of(script, arguments))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            found = [status, *(_text_of(file) for file in (printed, errors))]
        print(json.dumps(found), flush=True)


def _status_of(script: str, arguments: list[str]) -> int:
    """Run a script in this process; return its exit status."""
    sys.argv = ["-c", *arguments]
    status = 0
    try:
        exec(script, {"__name__": "__main__"})
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _text_of(file: Any) -> str:
    file.seek(0)
    return file.read()


if __name__ == "__main__":
    _serve()
