"""Reading files of weights: every kind of damage is a ``ConfigError`` that names the file."""

from __future__ import annotations

import pickle
import traceback
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import specdec_fast as sd
from specdec_fast.drafters.shared.checkpoint.weights import read_tensors
from support.lazy_signs import negative_view

WEIGHTS = {"a": torch.arange(6.0).view(2, 3)}


def test_both_formats_are_read(tmp_path):
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    torch.save(WEIGHTS, tmp_path / "w.bin")
    for name in ("w.safetensors", "w.bin"):
        found = read_tensors(tmp_path / name)
        assert list(found) == ["a"]
        assert torch.equal(found["a"], WEIGHTS["a"])


def test_lazy_signs_are_resolved(tmp_path):
    """PyTorch's format keeps them, and ops read memory."""
    torch.save({"a": negative_view(WEIGHTS["a"])}, tmp_path / "w.bin")
    found = read_tensors(tmp_path / "w.bin")["a"]
    assert not found.is_neg()
    assert torch.equal(found, WEIGHTS["a"])


PICKLED = pickle.dumps({"fc.weight": 1})


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["w.safetensors", "w.bin"])
@pytest.mark.parametrize(
    "content",
    [None, b"", b"damaged", PICKLED, PICKLED[:9]],
    ids=["missing", "empty", "damaged", "plain pickle", "cut"],
)
def test_a_file_that_cannot_be_read(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(sd.ConfigError, match=rf"cannot read the weights in .*{name}': [\w\[]") as raised:
        read_tensors(tmp_path / name)
    assert "weights_only" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": torch.eye(2).to_sparse()}, "a is no dense tensor with memory"),
        ({"a": torch.eye(2, device="meta")}, "a is no dense tensor with memory"),
        ({"a": 1.5}, "a is no dense tensor with memory; expected dense tensors by name"),
        ({1: torch.eye(2)}, "holds a dict; expected tensors by name"),
        ([torch.ones(2)], "holds a list; expected tensors by name"),
    ],
    ids=["sparse", "meta", "number", "number as name", "list"],
)
def test_something_else_than_tensors_by_name(tmp_path, content, message):
    torch.save(content, tmp_path / "w.bin")
    with pytest.raises(sd.ConfigError, match=message):
        read_tensors(tmp_path / "w.bin")


def test_code_does_not_run(tmp_path):
    torch.save({"a": SimpleNamespace(harmful=print)}, tmp_path / "w.bin")
    message = "cannot read the weights .*it holds types.SimpleNamespace, and only tensors are read"
    with pytest.raises(sd.ConfigError, match=message) as raised:
        read_tensors(tmp_path / "w.bin")
    shown = "".join(traceback.format_exception(raised.value))
    assert "weights_only` set to `False`" not in shown, "PyTorch's advice to run the code"
