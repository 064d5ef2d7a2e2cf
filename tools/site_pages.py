"""A hook of MkDocs (``mkdocs.yml``): pages that lie outside of ``docs/``, and links between pages.

Markdown files of this repository name one another in backticks, because a relative link in the README is dead on PyPI.
On the site each such name becomes a link.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Pages of the site by the file, outside of docs/, that holds their text.
PAGES = {
    "CONTRIBUTING.md": "extending.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
}
FIGURES = "bench/results"  # plots that pages show
_CODE_BLOCK = re.compile(r"^(```.*?^```)$", flags=re.M | re.S)
_FILE_NAME = re.compile(r"(?<!\[)`([\w./-]+\.md)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and figures that lie outside of ``docs/``."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for figure in (ROOT / FIGURES).glob("*.png"):
        files.append(File.generated(config, f"figures/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the names of files that are pages into links, relative to the folder of the page."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = PAGES.get(match[1], match[1].removeprefix("docs/"))
        is_page = match[1] in PAGES or (match[1].startswith("docs/") and files.get_file_from_path(target) is not None)
        if not is_page or target == page.file.src_uri:
            return match[0]
        return f"[{match[0]}]({posixpath.relpath(target, folder or '.')})"

    parts = [part if part.startswith("```") else _FILE_NAME.sub(link, part) for part in _CODE_BLOCK.split(markdown)]
    return "".join(parts).replace(f"](../{FIGURES}/", "](figures/").replace("](../docs/", "](")
