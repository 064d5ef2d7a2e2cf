"""A process of the task "compile": compiles what it reads, without importing models or the engine, which takes long."""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

from bench.gpu_.isolated_tasks import described


def main() -> None:
    """Compile the compilations in standard input; print a line for each."""
    target, notes = pickle.load(sys.stdin.buffer)
    for note in notes:
        said: dict[str, Any] = {"kernel": str(note.asked)}
        try:
            note.compile(target)
        except Exception as error:  # any error of the compiler; the other compilations continue
            said["error"] = described(error)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
