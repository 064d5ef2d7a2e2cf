"""The documents: what they link and name exists, their examples run, and the README stays short."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.integrations import ray
from support.source_tree import ROOT

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += [ROOT / folder / "README.md" for folder in ("bench", "examples", "specdec_fast/assets/demo_pair")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
SOURCES = ("specdec_fast", "csrc", "triton_kernels", "bench", "tests", "tools", "docs", "examples", ".ci")
# What commands of the documents write, and what belongs to other projects.
ELSEWHERE = {"gpu.json", "target.gguf", "llama.cpp", "data/spec_bench/question.jsonl"}
LONGEST_README, LONGEST_LINE = 80, 100


@pytest.fixture(scope="module")
def files() -> list[str]:
    found = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.is_file()]
    return ["/" + path.relative_to(ROOT).as_posix() for path in [*found, *ROOT.glob("*")]]


def prose(document: Path) -> list[str]:
    """Return the lines outside of code blocks, indented blocks and tables."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [line for line in text.split("\n") if not line.startswith(("    ", "|"))]


def files_named(text: str) -> list[str]:
    """Return what is in backticks and ends like a file name."""
    spans = re.findall(r"`([^`\s]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return [span for span in spans if re.fullmatch(r"[\w./-]+\.(md|py|cpp|h|json|png|jsonl|txt|toml|gguf)", span)]


def is_there(name: str, files: list[str]) -> bool:
    return name in ELSEWHERE or any(file.endswith("/" + name) for file in files)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_that_a_document_names_exists(document, files):
    text = document.read_text(encoding="utf-8")
    assert [name for name in files_named(text) if not is_there(name, files)] == []
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (document.parent / link).is_file()] == []


def test_a_file_that_is_not_there_is_noticed(files):
    (name,) = files_named("see `specdec_fast/no_such_module.py` and `python -m bench.ops`")
    assert not is_there(name, files)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_of_prose_are_short(document):
    assert [line for line in prose(document) if len(line) > LONGEST_LINE] == []


def test_the_readme_is_short_and_has_no_link_that_is_dead_on_pypi():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_README
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link] == []


@pytest.mark.parametrize("document", ["README.md", "docs/guide.md"])
def test_python_examples_run(document, capsys):
    """With the bundled pair instead of the models they name, and short texts."""
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
    code = "\n".join(blocks)
    stand_ins = {'"Qwen/Qwen3-8B"': "target", '"Qwen/Qwen3-0.6B"': "draft", "max_new_tokens=128": "max_new_tokens=8"}
    assert all(name in code for name in stand_ins)
    for name, stand_in in stand_ins.items():
        code = code.replace(name, json.dumps(str(demo_pair() / stand_in)) if "Qwen" in name else stand_in)
    names: dict[str, object] = {}
    exec(compile(code, document, "exec"), names)
    check_outputs(names["outputs"], capsys)


def test_the_quick_start_runs(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/index.md").read_text(), flags=re.M | re.S)
    names: dict[str, object] = {}
    exec(compile(code, "docs/index.md", "exec"), names)
    check_outputs(names["outputs"], capsys)


def test_the_program_of_the_design_prints_what_the_page_shows(capsys):
    """One request, from call to tokens: ids, draft tokens, rows, accepted tokens and pages."""
    text = (ROOT / "docs/design/index.md").read_text(encoding="utf-8")
    (code, shown) = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", text, flags=re.M | re.S).groups()
    exec(compile(code, "docs/design/index.md", "exec"), {})
    assert capsys.readouterr().out == shown


def check_outputs(outputs, capsys):
    assert isinstance(outputs, list)
    assert all(isinstance(o, sd.GenerationOutput) and o.error is None for o in outputs)
    assert outputs[0].text in capsys.readouterr().out


def test_the_api_reference_has_every_public_name_once():
    """And no other name, apart from the application of the server and what is for other projects."""
    named = re.findall(r"^::: specdec_fast\.(.+)$", (ROOT / "docs/api.md").read_text(), flags=re.M)
    others = [f"integrations.{module}.{name}" for name, module in ray._MODULES.items()]
    others += [
        "integrations.transformers.custom_generate",
        "integrations.lm_eval.EngineLM",
        "integrations.trl.rollout_func",
        "server.app.create_app",
    ]
    assert sorted(named) == sorted([*sd.__all__, *others])


def test_a_dead_link_fails_the_site(tmp_path):
    """With the options of `make docs`: --quiet, for example, would hide warnings from --strict."""
    pytest.importorskip("mkdocs")
    (options,) = re.findall(r"bin/mkdocs build(.*)", (ROOT / "Makefile").read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text("site_name: a test\n")
    command = [sys.executable, "-m", "mkdocs", "build", *options.split()]
    for text, status in (("[this page](index.md)", 0), ("[no page](nowhere.md)", 1)):
        (tmp_path / "docs/index.md").write_text(text)
        assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == status
