"""Rules of the source tree: which module imports which, which may compare backends, how large things may be."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specdec_fast.drafters import DRAFTERS
from specdec_fast.ops import AUTO, BACKENDS
from support.source_tree import PACKAGE, ROOT, SOURCES, TESTS, shown


def floors() -> tuple[dict[str, int], dict[str, set[str]]]:
    """Read docs/design/index.md: the floor of each room (module or subpackage), and rooms that may import only some."""
    section = (ROOT / "docs/design/index.md").read_text().split("## Where things are")[1].split("\n## ")[0]
    rank: dict[str, int] = {}
    narrow: dict[str, set[str]] = {}
    for floor, rooms, only in re.findall(r"^\| (\d+) \| (.+?) \| .+ \| (.*?) ?\|$", section, flags=re.MULTILINE):
        for room in re.findall(r"`(\w+)`", rooms):
            assert room not in rank, f"{room} stands on two floors"
            rank[room] = int(floor)
            if only:
                narrow[room] = set(re.findall(r"`(\w+)`", only))
    return rank, narrow


RANK, NARROW = floors()
LARGEST = {"lines of the file": 500, "lines of a function": 80}


def unit_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "triton_kernels" else parts[1]


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@pytest.fixture(scope="module", autouse=True)
def _without_garbage_collection():
    """Millions of nodes live until the last test; the collector, which looks at all of them, took half of the time."""
    gc.disable()
    yield
    tree_of.cache_clear()
    gc.enable()


def faults_of(paths: Iterable[Path], check: Callable[[Path], Any]) -> dict[str, Any]:
    """Return what a check finds in each file; files in which it finds nothing are left out."""
    return {shown(path): found for path in paths if (found := check(path))}


UNITS = {unit_of(path) for path in PACKAGE} | {"_C"}


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every module a file names: in import statements, in functions too, and in strings that are imported later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"{alias.name}." for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^specdec_fast(?:\.\w+)+", node.value)


def layer_faults(unit: str, tree: ast.AST) -> list[str]:
    names = [name.split(".") for name in imports_of(tree)]
    units = {name[1] if name[1] in UNITS else "__init__" for name in names if name[0] == "specdec_fast"}
    allowed = NARROW.get(unit, {lower for lower in RANK if RANK[lower] < RANK[unit]})
    return [f"{unit} imports {imported}" for imported in sorted(units - allowed - {unit})]


def test_every_room_has_its_floor():
    assert set(RANK) == UNITS
    assert all(RANK[room] < RANK[importer] for importer, rooms in NARROW.items() for room in rooms)


def test_imports_go_one_way():
    assert not faults_of(PACKAGE, lambda path: layer_faults(unit_of(path), tree_of(path)))


@pytest.mark.parametrize(
    ("unit", "source"),
    [("ops", "from specdec_fast.engine.engine import Engine"), ("schedulers", "import specdec_fast.ops"),
     ("oracle", "def f():\n from specdec_fast.ops import resolve"), ("models", "from specdec_fast import generate"),
     ("config", "from specdec_fast import _C"), ("engine", "from specdec_fast import cli"),
     ("oracle", "NAME = 'specdec_fast.engine.engine:Engine'"), ("drafters", "import specdec_fast.schedulers.base")],
)  # fmt: skip
def test_layer_check_rejects(unit, source):
    assert layer_faults(unit, ast.parse(source))


def test_schedulers_see_no_tensors():
    def imported(path: Path) -> set[str]:
        return {name.split(".")[0] for name in imports_of(tree_of(path))} & {"torch", "numpy", "transformers"}

    assert not faults_of((ROOT / "specdec_fast/schedulers").glob("*.py"), imported)


def backend_comparisons(tree: ast.AST) -> list[int]:
    """Lines where something is compared with a backend's name, by an operator or by a ``case``."""
    names = {*BACKENDS, AUTO, "triton", "flash"}
    compared = [n for n in ast.walk(tree) if isinstance(n, (ast.Compare, ast.MatchValue))]
    constants = ((n.lineno, c.value) for n in compared for c in ast.walk(n) if isinstance(c, ast.Constant))
    return [line for line, value in constants if value in names]


def test_only_the_registry_compares_backends():
    found = faults_of(PACKAGE, lambda path: backend_comparisons(tree_of(path)))
    assert list(found) == ["specdec_fast/ops/registry.py"]


@pytest.mark.parametrize(
    "source",
    ["if b == 'cpp': pass", "x = b in ('torch', 'cpp')", "match b:\n case 'triton': pass", "'auto' != b"],
)
def test_backend_check_rejects(source):
    assert backend_comparisons(ast.parse(source))


def concrete_drafters(tree: ast.AST) -> set[str]:
    """Drafters named in a file: their modules, their classes, or the strings that ask for them."""
    found = {name for name in imports_of(tree) if re.match(r"specdec_fast\.drafters\.(?!base)[a-z]\w*\.", name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and re.fullmatch(r"\w+Drafter", node.id):
            found.add(node.id)
        if isinstance(node, ast.Constant) and node.value in DRAFTERS:
            found.add(node.value)
    return found


def test_engine_names_no_concrete_drafter():
    assert not faults_of((ROOT / "specdec_fast/engine").glob("*.py"), lambda path: concrete_drafters(tree_of(path)))


@pytest.mark.parametrize(
    "source",
    ["from specdec_fast.drafters.draft_model.drafter import D", "isinstance(d, NgramDrafter)", "d == 'ngram'"],
)
def test_drafter_check_rejects(source):
    assert concrete_drafters(ast.parse(source))


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function; only statements are walked, since no expression holds one."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            nodes += getattr(node, name, ())


def size_faults(source: str, tree: ast.Module) -> list[str]:
    sizes = [("lines of the file", "", len(source.splitlines()))]
    sizes += [("lines of a function", f.name, (f.end_lineno or 0) - f.lineno + 1) for f in functions_of(tree)]
    return [f"{size} {kind} {name}" for kind, name, size in sizes if size > LARGEST[kind]]


def test_nothing_is_too_large():
    assert not faults_of([*SOURCES, *TESTS], lambda path: size_faults(text_of(path), tree_of(path)))


TOO_LARGE = {
    "file": "x = 1\n" * (LARGEST["lines of the file"] + 1),
    "function": "def f():\n" + " x = 1\n" * LARGEST["lines of a function"],
    "method": "class C:\n async def f(self):\n" + "  x = 1\n" * LARGEST["lines of a function"],
}


@pytest.mark.parametrize("source", TOO_LARGE.values(), ids=TOO_LARGE)
def test_size_check_rejects(source):
    assert size_faults(source, ast.parse(source))
    one_line_less = source.removesuffix(source.splitlines(keepends=True)[-1])
    assert not size_faults(one_line_less, ast.parse(one_line_less))


def packed_assignments(tree: ast.AST) -> list[int]:
    """Return the lines of ``a, b = x, y`` where one statement each reads better: not of swaps and recurrences."""
    lines = []
    for node in ast.walk(tree):
        is_tuple = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        if not is_tuple or any(isinstance(value, ast.Starred) for value in node.value.elts):
            continue
        targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
        written = {ast.unparse(element) for target in targets for element in target.elts}
        read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)}
        if targets and not written & read:
            lines.append(node.lineno)
    return lines


def test_assignments_are_not_packed():
    assert not faults_of(PACKAGE, lambda path: packed_assignments(tree_of(path)))


def test_packing_check_rejects():
    assert packed_assignments(ast.parse("self.a, self.b = a, b\nx, y = 0, f(1)")) == [1, 2]
    assert not packed_assignments(ast.parse("a, b = b, a\nx, y = pair\nfirst, *rest = 1, *others"))


def bases_of(paths: Iterable[Path]) -> dict[str, tuple[set[str], set[str]]]:
    """Every class's bases and methods, by its name."""
    bases: dict[str, tuple[set[str], set[str]]] = {}
    for node in (node for path in paths for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)):
        names, methods = bases.setdefault(node.name, (set(), set()))
        names |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases} - {node.name}
        methods |= {each.name for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return bases


def inherited(node: ast.AST, bases: dict[str, tuple[set[str], set[str]]]) -> set[str]:
    """The methods of a class's bases within the package: an override has the docstring of what it overrides."""
    methods: set[str] = set()
    names, seen = [ast.unparse(base).split("[")[0].split(".")[-1] for base in getattr(node, "bases", ())], set()
    while names:
        name = names.pop()
        if name in bases and name not in seen:
            seen.add(name)
            methods |= bases[name][1]
            names += bases[name][0]
    return methods


def undocumented(tree: ast.Module, bases: dict[str, tuple[set[str], set[str]]]) -> list[str]:
    """The module, public classes and functions without a docstring; what stands inside a function is not public."""
    missing = [] if ast.get_docstring(tree) else ["the module"]
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    while scopes:
        scope = scopes.pop()
        known = inherited(scope, bases)
        for node in scope.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name[0] != "_":
                is_setter = any(ast.unparse(decorator).endswith(".setter") for decorator in node.decorator_list)
                missing += [] if ast.get_docstring(node) or is_setter or node.name in known else [node.name]
                scopes += [node] if isinstance(node, ast.ClassDef) else []
    return missing


def test_everything_public_has_a_docstring():
    bases = bases_of(SOURCES)
    assert not faults_of(SOURCES, lambda path: undocumented(tree_of(path), bases))


def test_docstring_check_rejects():
    source = '"""A."""\nclass C:\n """B."""\n def f(self): pass\n def _g(self): pass\nasync def h(): pass'
    assert undocumented(ast.parse(source), {}) == ["h", "f"]
    source = '"""A."""\nclass C(p.B[int]):\n """B."""\n def f(self): pass\n def g(self): pass'
    assert undocumented(ast.parse(source), {"A": (set(), {"f"}), "B": ({"A"}, set())}) == ["g"]


def repeated_classes(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the public classes that several files define, with these files."""
    files: dict[str, list[str]] = {}
    for file, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                files.setdefault(node.name, []).append(file)
    return {name: places for name, places in files.items() if len(places) > 1}


def test_no_two_public_classes_have_one_name():
    assert not repeated_classes({shown(path): tree_of(path) for path in PACKAGE})


def test_class_name_check_rejects():
    trees = {"a.py": "class A: pass\nclass _B: pass", "b.py": "class _B: pass", "c.py": "class A(C): pass"}
    assert repeated_classes({file: ast.parse(source) for file, source in trees.items()}) == {"A": ["a.py", "c.py"]}


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_path_of_the_machine_it_was_written_on():
    machine = re.compile(rb"(?<![\w.])/" + rb"work/")
    named = [shown(path) for path in tracked_files() if machine.search(path.read_bytes())]
    assert not named
    assert machine.search(b"cd /" + b"work/main"), "the pattern finds what it is for"
