"""GGUF files that cannot be read are refused with file, tensor and reason."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest

from specdec_fast.errors import ConfigError
from specdec_fast.quantization.gguf.container import plain_values, read_gguf


@pytest.fixture
def path(tmp_path):
    """A file with a metadata text and two tensors, Q8_0 before F16."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_string("llama.note", "some text")
    weights = np.arange(128, dtype=np.float32).reshape(2, 64)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("quantised", gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.add_tensor("plain", weights.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _replace(path, before, after):
    content = path.read_bytes()
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, after))


def _type_of(name, number):
    """The bytes of a tensor's name, its shape and its type in the header."""
    return name.encode() + np.array([2], "<u4").tobytes() + np.array([64, 2], "<u8").tobytes() + number


def test_names_types_shapes_and_numbers_are_read(path):
    file = read_gguf(path)
    assert file.value("llama.note") == "some text"
    assert file.value("llama.other", 3) == 3
    assert [(each.name, each.type_name, each.shape) for each in file.tensors.values()] == [
        ("quantised", "Q8_0", (2, 64)), ("plain", "F16", (2, 64)),
    ]  # fmt: skip
    assert plain_values(file.tensors["plain"]).flatten().tolist() == list(range(128))


def test_another_format_is_refused(path):
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ConfigError, match=r"is no GGUF file: it begins with b'PK\\x03\\x04'"):
        read_gguf(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read '.*none.gguf': No such file"):
        read_gguf(tmp_path / "none.gguf")


def test_every_truncation_is_refused(path):
    """Of every length, the header cut off anywhere included; the package gguf notices few of them, late."""
    content = path.read_bytes()
    for length in range(len(content) - 1, 3, -7):
        path.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"truncated|cannot be read"):
            read_gguf(path)


def test_a_tensor_beyond_the_files_end_is_named(path):
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigError, match=r"is truncated: tensor 'plain' of .* ends at byte \d+, the file at \d+"):
        read_gguf(path)


def test_an_array_longer_than_the_file_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_array("llama.numbers", [7, 7, 7])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _replace(path, np.array([3], "<u8").tobytes() + b"\x07", np.array([2**60], "<u8").tobytes() + b"\x07")
    with pytest.raises(ConfigError, match="truncated"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("number", "name"),
    [(10, "Q2_K"), (29, "IQ1_M"), (999, "number 999, which is unknown")],
    ids=["Q2_K", "IQ1_M", "999"],
)
def test_an_unknown_type_is_named_with_its_tensor(path, number, name):
    known = np.array([8], "<u4").tobytes()
    _replace(path, _type_of("quantised", known), _type_of("quantised", np.array([number], "<u4").tobytes()))
    with pytest.raises(ConfigError, match=f"tensor 'quantised' of '.*model.gguf' has the type {name}; types that are"):
        read_gguf(path)


def test_rows_that_are_no_whole_blocks_are_refused(path):
    known = np.array([8], "<u4").tobytes()
    _replace(path, _type_of("quantised", known), _type_of("quantised", np.array([12], "<u4").tobytes()))
    with pytest.raises(ConfigError, match=r"tensor 'quantised' .* \[2, 64\]; expected rows of a .* multiple of 256"):
        read_gguf(path)


def test_another_byte_order_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="another byte order"):
        read_gguf(path)


def test_one_of_several_parts_is_refused(tmp_path):
    path = tmp_path / "model-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"is one of 3 parts; join them"):
        read_gguf(path)


def test_without_the_package_the_error_says_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"needs the package gguf; pip install gguf"):
        read_gguf(path)
