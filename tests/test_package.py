"""The package: its names are imported when they are used, and all of them exist."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import specdec_fast as sd
from specdec_fast import cli
from support.source_tree import ROOT

SLOW = ("torch", "transformers", "numpy", "fastapi", "pydantic")


def imported_by(code: str) -> tuple[str, set[str]]:
    """Run code in another process; return what it printed and which slow packages it imported."""
    report = f"import sys; print('|', *[name for name in {SLOW} if name in sys.modules])"
    command = [sys.executable, "-c", f"try:\n {code}\nexcept SystemExit: pass\n{report}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    text, _, names = printed.rpartition("|")
    return text, set(names.split())


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_the_version_and_the_help_import_nothing_slow(argument):
    text, names = imported_by(f"from specdec_fast.cli import main; main([{argument!r}])")
    assert text.startswith("specdec-fast 0" if argument == "--version" else "usage:")
    assert not names


def test_names_are_imported_when_they_are_used():
    code = "import specdec_fast as sd; sd.__version__; sd.SpecDecError; dir(sd)"
    assert imported_by(code)[1] == set()


@pytest.mark.grid
def test_an_engine_imports_nothing_that_only_a_server_needs():
    names = imported_by("import specdec_fast.commands.serve; from specdec_fast import Engine")[1]
    assert {"torch", "transformers"} <= names
    assert not {"fastapi", "pydantic"} & names


def test_every_public_name_exists_and_is_declared_for_type_checkers():
    tree = ast.parse((ROOT / "specdec_fast/__init__.py").read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    declared = {alias.name: node.module for node in checked.body for alias in node.names}
    assert sorted(declared) == sorted(sd.__all__)
    for name, module in declared.items():
        assert getattr(sd, name) is getattr(__import__(module, fromlist=[name]), name)
    assert set(sd.__all__) <= set(dir(sd))


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        sd.no_such_name  # noqa: B018
    assert sd.drafters.DRAFTERS


def test_summaries_are_the_first_lines_of_the_commands():
    for name, summary in cli._COMMANDS.items():
        assert (cli._module(name).__doc__ or "").split("\n")[0] == summary


@pytest.mark.grid
def test_python_without_assertions_decodes_and_refuses_as_with_them():
    """``python -O`` removes them, so none may be what refuses a wrong call."""
    code = """
import specdec_fast as sd
from specdec_fast.assets import demo_pair
engine = sd.Engine(demo_pair() / "target", demo_pair() / "draft")
outputs = engine.generate(["One day", [], [-1], [5000], "\\ud800"], sd.SamplingParams(max_new_tokens=8))
print([type(output.error).__name__ for output in outputs], outputs[0].token_ids, __debug__)
for keywords in ({"params": [None]}, {"progress": 3}, {"params": 5}, {"no": 1}):
    try:
        print(engine.generate([[5], [6]], **keywords))
    except sd.SpecDecError as error:
        print(type(error).__name__)
"""
    found = [
        subprocess.run([sys.executable, *option, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
        for option in ((), ("-O",))
    ]
    usual, optimised = (each.stdout for each in found)
    assert usual.count("InvalidPromptError") == 4
    assert usual.endswith("ConfigError\nConfigError\nInvalidParamsError\nConfigError\n")
    assert optimised == usual.replace("True", "False")
