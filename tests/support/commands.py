"""Helpers for the tests of commands that run on the bundled pair."""

from __future__ import annotations

import json
from pathlib import Path

from specdec_fast.assets import demo_pair

TARGET, DRAFT = (str(demo_pair() / which) for which in ("target", "draft"))
PAIR = ["--target", TARGET, "--draft", DRAFT, "--dtype", "float32"]


def write_lines(path: Path, *lines: object) -> str:
    """Write a prompt file: objects as JSON, strings and bytes as they are."""
    parts = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"".join(part + b"\n" for part in parts))
    return str(path)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def options_of(values: dict[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", *str(value).split())]
