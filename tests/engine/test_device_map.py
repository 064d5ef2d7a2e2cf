"""``device_map`` as a setting: what it excludes, and what the command line makes of it."""

from __future__ import annotations

import argparse
import copy

import pytest

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import add_device_map
from specdec_fast.models.placement import place

PAIR = demo_pair()
MAP = {"": "cpu"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu"}, "device_map and device=cpu exclude each other"),
        ({"tp_size": 2}, "device_map and tp_size=2 exclude each other"),
        ({"quantization": "int8"}, "device_map and quantization=int8 exclude each other"),
        ({"device_map": "everywhere"}, "device_map='everywhere': expected one of auto, balanced"),
        ({"device_map": {}}, r"device_map=\{\}: expected one of auto"),
        ({"device_map": {0: "cpu"}}, r"device_map=\{0: 'cpu'\}: expected one of auto"),
        ({"device_map": {"lm_head": "abacus"}}, r"device_map\['lm_head'\]='abacus': expected cpu, cuda"),
        ({"device_map": {"": None}}, r"device_map\[''\]=None: expected cpu, cuda"),
        ({"device_map": {"": -1}}, r"device_map\[''\]=-1: expected cpu, cuda"),
        ({"device_map": {"lm_head": "meta"}}, r"device_map\['lm_head'\]='meta' stores no values"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(sd.ConfigError, match=message):
        sd.EngineConfig(**{"device_map": MAP, **settings})


def test_nothing_is_offloaded_to_the_disk():
    with pytest.raises(sd.ConfigError, match=r"parts of the model where nothing computes: model.norm \(disk\)"):
        sd.Engine(PAIR / "target", None, device_map={"model": "cpu", "model.norm": "disk", "lm_head": "cpu"})


def test_a_map_without_some_module(target):
    with pytest.raises(sd.ConfigError, match=r"names no device for model.embed_tokens.weight, .*\(2 in all\)"):
        place(copy.deepcopy(target), {"model.layers": "cpu", "lm_head": "cpu"})


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"model.norm": "cpu"}, r"names no device for model.embed_tokens.weight, .*; add their modules"),
        ({"": "cpu", "model.layerz.0": "cpu"}, r"names model.layerz.0 \(1 in all\), which a LlamaForCausalLM has not"),
    ],
)
def test_maps_that_do_not_fit_the_model(device_map, message):
    with pytest.raises(sd.ConfigError, match=message):
        sd.Engine(PAIR / "target", None, device_map=device_map)


def test_a_config_with_a_map_can_be_hashed():
    assert hash(sd.EngineConfig(device_map={"": "cpu"})) == hash(sd.EngineConfig(device_map={"": "cpu"}))


def test_a_loaded_model_takes_no_map(target):
    with pytest.raises(sd.ConfigError, match=r"device_map=.*, but target is loaded already"):
        sd.Engine(target, None, device_map=MAP)


def test_codes_lie_on_one_device(tmp_path):
    with pytest.raises(sd.ConfigError, match=r"but the weights of .*\.gguf' are in few bits, which are kept on one"):
        sd.Engine(tmp_path / "model.gguf", None, device_map=MAP)


def test_a_map_onto_one_device_changes_nothing():
    mapped, plain = (sd.Engine(PAIR / "target", None, **settings) for settings in ({"device_map": MAP}, {}))
    assert mapped.describe() == plain.describe()


@pytest.mark.parametrize(
    ("text", "expected"), [("auto", "auto"), ('{"model": 0, "lm_head": "cpu"}', {"model": 0, "lm_head": "cpu"})]
)
def test_option(text, expected):
    parser = argparse.ArgumentParser()
    add_device_map(parser)
    device_map = parser.parse_args(["--device-map", text]).device_map
    assert sd.EngineConfig(device_map=device_map).device_map == expected


def test_option_that_is_no_json(capsys):
    parser = argparse.ArgumentParser()
    add_device_map(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--device-map", "{model: 0}"])
    assert "is no JSON such as" in capsys.readouterr().err
