"""The files that an op needs are those that CONTRIBUTING.md lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec_fast.ops import Op, all_ops
from support.source_tree import ROOT

BACKENDS = {"every op": "torch", "C++": "cpp", "Triton": "triton"}
SOURCES = (
    "specdec_fast/**/*.py",
    "bench/op_cases/*.py",
    "triton_kernels/*.py",
    "csrc/**/*.h",
    "csrc/**/*.cpp",
    "setup.py",
)
WATCHED = "compact_kv_"  # one file calls it, so every other file that names it is a place to write it in
CALLER = "specdec_fast/kv_cache/accepted_paths.py"


def places(op: Op) -> set[str]:
    """Read the table of CONTRIBUTING.md: the files of one op."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Adding an op")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \|", section, flags=re.MULTILINE)
    assert {kind for kind, _ in rows} == set(BACKENDS)
    return {file.format(op=basename(op)) for kind, file in rows if BACKENDS[kind] in op.implementations}


def basename(op: Op) -> str:
    return op.name.rstrip("_")


def words_of_python(source: str) -> Iterator[str]:
    """Yield names and strings of the code; docstrings and comments name ops for the reader only."""
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings among them
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield from re.findall(r"\w+", node.value)
        for name in ("id", "attr", "name", "arg", "module"):
            if isinstance(found := getattr(node, name, None), str):
                yield from re.findall(r"\w+", found)


def words(path: Path) -> set[str]:
    source = path.read_text()
    if path.suffix == ".py":
        return set(words_of_python(source))
    return set(re.findall(r"\w+", re.sub(r"//.*|/\*.*?\*/", "", source)))


def names(path: Path, op: Op) -> bool:
    wanted = {op.name, basename(op)}
    if path.stem in wanted:
        return True
    return basename(op) in path.read_text() and bool(words(path) & wanted)  # most files need not be parsed


@pytest.mark.parametrize("op", all_ops().values(), ids=lambda op: op.name)
def test_every_place_names_the_op(op):
    assert [place for place in sorted(places(op)) if not names(ROOT / place, op)] == []


def test_no_other_file_has_to_name_an_op():
    op = all_ops()[WATCHED]
    assert set(op.implementations) == set(BACKENDS.values())
    naming = {path.relative_to(ROOT).as_posix() for glob in SOURCES for path in ROOT.glob(glob) if names(path, op)}
    assert naming == places(op) | {CALLER}


def test_docstrings_and_comments_do_not_count():
    assert set(words_of_python('"""linear"""\ndef f():\n "append_kv_"\n return "a:halve"  # verify')) == {
        "f",
        "a",
        "halve",
    }
