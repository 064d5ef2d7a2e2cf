"""Compiled kernels in a file, for a machine whose Triton has no cache yet."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from triton import knobs

from bench.gpu_ import kernel_pack


def test_kernels_are_found_where_another_cache_has_them(tmp_path, monkeypatch):
    """Groups name their files by whole paths, so these are those of the new folder; what only people read stays."""
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "kernels.tar.xz"
    kernel = old / "HASH"
    kernel.mkdir(parents=True)
    for name in ("k.cubin", "k.json", "k.ttgir"):
        (kernel / name).write_text(name)
    paths = {name: str(kernel / name) for name in ("k.cubin", "k.json", "k.ttgir")}
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))
    monkeypatch.setattr(knobs.cache, "dir", str(old))
    assert kernel_pack.pack(file) == file.stat().st_size > 0
    monkeypatch.setattr(knobs.cache, "dir", str(new))
    assert kernel_pack.unpack(file) == 1
    found = json.loads((new / "HASH" / "__grp__k.json").read_text())["child_paths"]
    assert found == {name: str(new / "HASH" / name) for name in paths}
    assert (new / "HASH" / "k.cubin").read_text() == "k.cubin"
    assert not (new / "HASH" / "k.ttgir").exists()
    kernel_pack.pack(file)  # replaced as a whole
    assert kernel_pack.unpack(file) == 1
