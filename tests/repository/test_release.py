"""What ``make dist`` checks before it builds. The build itself takes minutes and is not in the suite."""

from __future__ import annotations

import zipfile

import pytest
from release import changelog_version, check, check_version

import specdec_fast as sd
from support.source_tree import ROOT


def test_the_changelog_begins_with_the_version_of_the_package():
    check_version(sd.__version__, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("heading", ["## 1.2.0 (unreleased)", "## 1.2.0 (2030-01-31)", "## 1.2.0"])
def test_the_topmost_section_counts(heading):
    assert changelog_version(f"# Changelog\n\n{heading}\n\n### Ops\n\n## 1.1.0 (2029-12-31)\n") == "1.2.0"


def test_another_version_in_the_changelog_ends_the_release():
    with pytest.raises(SystemExit, match=r"__init__\.py says version 1\.2\.0, .*CHANGELOG\.md says 1\.1\.0\. Set"):
        check_version("1.2.0", "# Changelog\n\n## 1.1.0 (2029-12-31)\n")


def test_a_changelog_without_a_section_ends_the_release():
    with pytest.raises(SystemExit, match=r"expected a heading such as '## 1\.2\.0"):
        changelog_version("# Changelog\n")


@pytest.mark.parametrize("libraries", [[], ["specdec_fast/_C.so", "specdec_fast.libs/libgomp-24e2ab19.so.1.0.0"]])
def test_a_wheel_without_the_extension_or_with_a_second_openmp_is_refused(tmp_path, libraries):
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in libraries:
            archive.writestr(name, b"")
    with pytest.raises(SystemExit, match=r"made\.whl should hold one library"):
        check(wheel)
