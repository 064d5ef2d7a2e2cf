"""Helpers for the tests of commands that run on the bundled pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from specdec_fast.assets import demo_pair
from specdec_fast.cli import main
from support.source_tree import ROOT

TARGET, DRAFT = (str(demo_pair() / which) for which in ("target", "draft"))
EAGLE3 = f"eagle3:{demo_pair() / 'eagle3'}"
PAIR = ["--target", TARGET, "--draft", DRAFT, "--dtype", "float32"]
RUN = "import sys, torch; torch.set_num_threads(1)\nfrom specdec_fast.cli import main\nsys.exit(main(sys.argv[1:]))"


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


def child(before: str, argv: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a process of its own, after some code."""
    command = [sys.executable, "-c", f"{before}\n{RUN}", *argv]
    return subprocess.run(command, capture_output=True, cwd=ROOT, check=False, **options)  # type: ignore[call-overload]


def run_generate(path: str, draft: str = DRAFT, **options: object) -> tuple[int, list[dict]]:
    """Run ``generate`` in the present folder; return its exit status and the records it wrote."""
    Path("out.jsonl").unlink(missing_ok=True)
    values = {"target": TARGET, "draft": draft, "prompts": path, "output": "out.jsonl", "max-new-tokens": 5}
    status = main(["generate", *options_of({**values, "dtype": "float32", **options})])
    return status, read_lines(Path("out.jsonl"))


def run_verify(folder: Path, prompts: list[list[int]], **options: object) -> tuple[int, dict]:
    """Run ``verify`` in the present folder; return its exit status and its report."""
    path = write_lines(folder / "in.jsonl", *({"prompt_ids": ids} for ids in prompts))
    values = {"target": TARGET, "draft": DRAFT, "prompts": path, "json": "report.json", "max-new-tokens": 6}
    status = main(["verify", *options_of({**values, **options})])
    return status, json.loads(Path("report.json").read_text())
