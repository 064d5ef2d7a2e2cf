"""Files of checkpoints: what is listed and read, and what is refused with the file's name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from specdec_fast.errors import ConfigError
from specdec_fast.quantization.checkpoint.config import read_quantization_config
from specdec_fast.quantization.checkpoint.files import INDEX, open_folder
from support.checkpoint_codes import CONFIGS

TENSORS = {
    "a.q.qweight": torch.zeros(4, 8, dtype=torch.int32),
    "a.q.scales": torch.ones(1, 8),
    "a.norm.weight": torch.ones(32),
    "a.o.weight": torch.ones(8, 32),
    "a.r.weight": torch.ones(8, 32).to(torch.float8_e4m3fn),
}
GPTQ = read_quantization_config(CONFIGS["gptq"])


@pytest.fixture
def folder(tmp_path):
    """Two files with an index."""
    shards = {"one.safetensors": ["a.q.qweight", "a.norm.weight"]}
    shards["two.safetensors"] = [name for name in TENSORS if name not in shards["one.safetensors"]]
    for file, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / file)
    write_index(tmp_path, {name: file for file, names in shards.items() for name in names})
    return tmp_path


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def weight_map_of(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def test_tensors_of_one_linear_come_from_several_files(folder):
    files = open_folder(folder)
    assert sorted(files.names) == sorted(TENSORS)
    assert sorted(files.suffixes_of("a.q")) == ["qweight", "scales"]
    assert files.modules_with_codes(GPTQ) == {"a.q"}
    tensors = files.tensors_of("a.q")
    assert torch.equal(tensors.take("scales", (torch.float32,), (1, 8)), TENSORS["a.q.scales"])
    with pytest.raises(ConfigError, match=r"one\.safetensors: a\.q\.qweight has shape"):
        tensors.take("qweight", (torch.int32,), (1, 1))
    with pytest.raises(ConfigError, match=r"\.safetensors: a\.q\.qzeros is missing; the linear has nothing"):
        tensors.take("qzeros", (torch.int32,), (1, 1))


def test_tensors_say_which_linears_have_codes(folder):
    files = open_folder(folder)
    assert files.has_codes("a.q", GPTQ)
    assert not files.has_codes("a.o", GPTQ)
    assert not files.has_codes("no.such.linear", GPTQ)
    with pytest.raises(ConfigError, match=r"two\.safetensors: a\.r\.qweight is missing, although .* it has weight"):
        files.has_codes("a.r", GPTQ)
    with pytest.raises(ConfigError, match=r"a\.o\.weight_packed is missing, although quantization_config says"):
        files.has_codes("a.o", read_quantization_config(CONFIGS["int4"]))


@pytest.mark.parametrize("kept", [0, 4, 100, -8])
def test_truncated_files_are_named(folder, kept):
    """Cut within the length of the header, within the header, and within the last tensor."""
    whole = (folder / "two.safetensors").read_bytes()
    (folder / "two.safetensors").write_bytes(whole[:kept])
    with pytest.raises(ConfigError, match=r"two\.safetensors is missing, damaged or truncated"):
        open_folder(folder)


def test_files_that_vanish_are_named(folder):
    files = open_folder(folder)
    (folder / "one.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"one\.safetensors: the tensors of a\.q cannot be read"):
        files.tensors_of("a.q")
    with pytest.raises(ConfigError, match=r"one\.safetensors: a\.norm\.weight cannot be read"):
        files.dtype_of("a.norm.weight")
    with pytest.raises(ConfigError, match=r"one\.safetensors is missing, damaged or truncated"):
        open_folder(folder)


def test_indices_that_do_not_fit_are_refused(folder):
    correct = weight_map_of(folder)
    for changes, message in (
        ({"b.weight": "one.safetensors"}, r"one\.safetensors lacks b\.weight, which .* says it has"),
        ({"a.norm.weight": "two.safetensors"}, r"two\.safetensors lacks a\.norm\.weight"),
        ({"a.norm.weight": "../one.safetensors"}, r"a\.norm\.weight is in '\.\./one\.safetensors'; expected the name"),
        ({"a.norm.weight": ".."}, r"is in '\.\.'; expected the name of a file beside it"),
        ({"a.norm.weight": 3}, "is in 3; expected the name of a file beside it"),
    ):
        write_index(folder, {**correct, **changes})
        with pytest.raises(ConfigError, match=message):
            open_folder(folder)
    for text, message in (("[]", "has no object weight_map"), ("{", "is no index"), ('{"weight_map": 1}', "no object")):
        (folder / INDEX).write_text(text)
        with pytest.raises(ConfigError, match=message):
            open_folder(folder)


def test_a_name_in_two_files_is_refused(folder):
    names = ("a.q.qweight", "a.norm.weight", "a.q.scales")
    save_file({name: TENSORS[name] for name in names}, folder / "one.safetensors")
    with pytest.raises(ConfigError, match=r"two\.safetensors: a\.q\.scales is also in .*one\.safetensors"):
        open_folder(folder)


def test_files_that_could_run_code_are_not_read(tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors; codes are"):
        open_folder(tmp_path)
