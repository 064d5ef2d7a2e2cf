"""Figures of the source tree that a reader feels: ``make report`` prints them, and CI does too.

Files that one call and one step pass through are traced on the bundled pair; everything else is counted. Nothing
fails here: the figures are for a look.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "specdec_fast"
KERNELS = ROOT / "triton_kernels"
TESTS = ROOT / "tests"
DESIGN = ROOT / "docs/design"
_SHOWN = 5  # of the longest files and functions
_LONG_FILE = 500
_LONG_FUNCTION = 80
_STEPS_BEFORE = 3  # steps after which a batch's steps are alike


def python_files(*folders: Path) -> list[Path]:
    """Return the Python files below some folders."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def trees(paths: list[Path]) -> dict[Path, ast.Module]:
    """Return the syntax tree of every file."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def files_passed(action: Callable[[], Any]) -> list[str]:
    """Return the files of the package whose functions an action calls in its own thread."""
    passed: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        passed.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    folders = (str(PACKAGE), str(KERNELS))
    return sorted(str(Path(name).relative_to(ROOT)) for name in passed if name.startswith(folders))


def traced_files() -> dict[str, list[str]]:
    """Return the files that a warm call and a steady step of the bundled pair pass through, plain and as a tree."""
    import torch

    import specdec_fast as sd
    from specdec_fast.assets import demo_pair

    torch.set_num_threads(1)
    target, draft = (str(demo_pair() / name) for name in ("target", "draft"))
    prompts = ["One day", "The sum of 3 and 4 is", "Once", "In the"]
    params = sd.SamplingParams(max_new_tokens=32, ignore_eos=True)
    engine = sd.Engine(target, draft, max_batch_size=4, num_draft_tokens=3)
    engine.generate(prompts, params, progress=False)
    call = files_passed(lambda: engine.generate(prompts, params, progress=False))
    step = _files_of_a_step(engine, prompts, params)
    tree_engine = sd.Engine(target, "ngram-trie", max_batch_size=4, num_draft_tokens=3)
    tree_engine.generate(prompts, params, progress=False)
    return {"call": call, "step": step, "tree step": _files_of_a_step(tree_engine, prompts, params)}


def _files_of_a_step(engine: Any, prompts: list[str], params: Any) -> list[str]:
    from specdec_fast.engine.input import RequestBuilder
    from specdec_fast.request.prompt_options import PromptOptions

    builder = RequestBuilder(engine.target, engine.tokenizer, engine.core.drafting.length_policy.max_draft_tokens)
    for index, prompt in enumerate(prompts):
        engine.core.add(builder.build(index, prompt, params, PromptOptions()))
    for _ in range(_STEPS_BEFORE):
        engine.core.step()
    files = files_passed(engine.core.step)
    engine.core.cancel_all()
    return files


def import_circles(modules: dict[Path, ast.Module]) -> list[list[str]]:
    """Return groups of files that import one another, be it inside of a function or for types alone."""
    graph = {_module_name(path): set(_imported(tree)) for path, tree in modules.items()}
    known = set(graph)
    edges = {name: {_known(target, known) for target in targets} - {None, name} for name, targets in graph.items()}
    return [sorted(group) for group in _strong_components(edges) if len(group) > 1]


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("specdec_fast", *parts) if parts[0] == "triton_kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _known(name: str, known: set[str]) -> str | None:
    """Return the module that an import names: itself, or the one that defines the imported name."""
    module = name if name in known else name.rpartition(".")[0]
    return module if module in known else None


def _strong_components(edges: dict[str, set[Any]]) -> list[set[str]]:
    """Return the strongly connected components of a graph (two passes; Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()
    for start in edges:
        _visit(start, edges, seen, order.append)
    reverse: dict[str, set[str]] = {name: set() for name in edges}
    for name, targets in edges.items():
        for target in targets:
            reverse[target].add(name)
    seen.clear()
    components = []
    for name in reversed(order):
        component: list[str] = []
        _visit(name, reverse, seen, component.append)
        if component:
            components.append(set(component))
    return components


def _visit(name: str, edges: dict[str, set[Any]], seen: set[str], leave: Callable[[str], None]) -> None:
    """Visit what can be reached and was not seen, depth first; call ``leave`` with each name after its children."""
    if name in seen:
        return
    seen.add(name)
    for target in edges[name]:
        _visit(target, edges, seen, leave)
    leave(name)


def is_packed(node: ast.AST) -> bool:
    """Return whether a statement assigns several values at once: ``a, b = x, y``; swaps count, too."""
    is_tuple = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
    return is_tuple and any(isinstance(target, ast.Tuple) for target in node.targets)


def docstring_lines(tree: ast.Module) -> int:
    """Count the lines of a file's docstrings."""
    total = 0
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                total += (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def num_lines(path: Path) -> int:
    """Count the lines of a file."""
    return path.read_text(encoding="utf-8").count("\n")


def percentile(values: list[int], share: float) -> int:
    """Return the value below which so large a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def function_sizes(modules: dict[Path, ast.Module]) -> list[tuple[int, str]]:
    """Return the lines of every function, with its place."""
    sizes = []
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                sizes.append((size, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return sorted(sizes, reverse=True)


def counted() -> dict[str, Any]:
    """Return the figures that need no run of the library."""
    package = trees(python_files(PACKAGE, KERNELS))
    nodes = [node for tree in package.values() for node in ast.walk(tree)]
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    sizes = {path: num_lines(path) for path in [*package, *python_files(TESTS)]}
    documents = sorted(DESIGN.rglob("*.md"))
    functions = function_sizes(package)
    of_package = [sizes[path] for path in package]
    return {
        "import circles": import_circles(package),
        "packed assignments, %": round(100 * sum(map(is_packed, assignments)) / len(assignments), 2),
        "entries of drafters/": sum(path.name != "__pycache__" for path in (PACKAGE / "drafters").iterdir()),
        "docstring lines of the package": sum(map(docstring_lines, package.values())),
        "lines of the package": sum(of_package),
        "lines of the tests": sum(sizes.values()) - sum(of_package),
        "files of the package": len(package),
        "words of docs/design": sum(len(re.findall(r"\S+", path.read_text(encoding="utf-8"))) for path in documents),
        "lines of a file, 50% / 90% / most": _spread(of_package),
        "lines of a function, 50% / 90% / most": _spread([size for size, _ in functions]),
        f"files above {_LONG_FILE} lines": [str(p.relative_to(ROOT)) for p, n in sizes.items() if n > _LONG_FILE],
        f"functions above {_LONG_FUNCTION} lines": [place for size, place in functions if size > _LONG_FUNCTION],
        "longest files": _longest([(size, str(path.relative_to(ROOT))) for path, size in sizes.items()]),
        "longest functions": _longest(functions),
    }


def _spread(values: list[int]) -> str:
    return f"{percentile(values, 0.5)} / {percentile(values, 0.9)} / {max(values)}"


def _longest(sizes: list[tuple[int, str]]) -> list[str]:
    return [f"{place} ({size})" for size, place in sorted(sizes, reverse=True)[:_SHOWN]]


def main() -> None:
    """Print the figures, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--no-trace", action="store_true", help="leave out what needs a run of the library")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    if not args.no_trace:
        figures = {f"files of a {name}": files for name, files in traced_files().items()}
    figures |= counted()
    for name, value in figures.items():
        if isinstance(value, list):
            print(f"{name}: {len(value)}")
            for item in value:
                print(f"    {' <-> '.join(item) if isinstance(item, list) else item}")
        else:
            print(f"{name}: {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
