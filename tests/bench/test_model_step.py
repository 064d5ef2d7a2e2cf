"""``bench.model_step``: bytes follow from parameters, times grow with the work, errors name what is known."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")

from bench import model_step
from bench.common.packed_formats import FP8
from bench.common.pairs import PAIRS, TINY_DRAFT, TINY_TARGET, ModelShape, config_of
from bench.model_step_ import recording
from bench.model_step_.devices import DEVICES, device_named
from bench.model_step_.kernels import FUSED, PRESENT, Batch, Kernel, forward_kernels
from bench.model_step_.recording import WEIGHTS, record
from specdec_fast.errors import ConfigError
from specdec_fast.models.rounded_models import weights_to_round
from specdec_fast.planner.costs import Device
from support.grids import grid
from support.source_tree import ROOT

VOCAB = 97
H200 = DEVICES["h200"]


@pytest.fixture(scope="module")
def tiny() -> recording.Recorded:
    return record(replace(TINY_TARGET, num_hidden_layers=5), VOCAB, torch.bfloat16)


def parameter_bytes(shape: ModelShape, vocab_size: int) -> int:
    """Bytes that a forward reads whatever its rows: all parameters but a separate embedding, and RoPE's frequencies."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape, vocab_size), dtype=torch.bfloat16)
    embedding = 0 if shape.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    return 2 * (sum(p.numel() for p in model.parameters()) - embedding) + 4 * shape.head_dim // 2


@pytest.mark.parametrize("way", model_step.WAYS)
@pytest.mark.parametrize("shape", [TINY_TARGET, TINY_DRAFT], ids=["untied", "tied"])
def test_a_forward_without_rows_reads_every_parameter_once(shape, way):
    shape = replace(shape, num_hidden_layers=4)
    kernels = forward_kernels(record(shape, VOCAB, torch.bfloat16), Batch(0, 1, 8), way)
    assert sum(kernel.num_bytes for kernel in kernels) == parameter_bytes(shape, VOCAB)


@pytest.mark.parametrize("way", model_step.WAYS)
def test_layers_that_are_not_recorded_are_those_that_are(tiny, way, monkeypatch):
    monkeypatch.setattr(recording, "_RECORDED_LAYERS", 5)
    whole = record(replace(TINY_TARGET, num_hidden_layers=5), VOCAB, torch.bfloat16)
    assert (tiny.num_recorded, whole.num_recorded) == (2, 5)
    batch = Batch(3, 4, 700)
    assert forward_kernels(tiny, batch, way) == forward_kernels(whole, batch, way)


@pytest.mark.parametrize("way", model_step.WAYS)
@pytest.mark.parametrize("grown", [{"batch_size": 9}, {"context": 2000}, {"batch_size": 80}])
def test_more_sequences_or_positions_cost_more(tiny, way, grown):
    batch = Batch(8, 6, 1024)
    small, large = forward_kernels(tiny, batch, way), forward_kernels(tiny, replace(batch, **grown), way)
    for figure in (lambda k: k.num_bytes, lambda k: k.flops, lambda k: k.seconds(H200)):
        assert sum(map(figure, small)) < sum(map(figure, large))


def test_keys_and_values_are_read_once_per_sequence(tiny):
    """Rows of one sequence share them: K + 1 rows read the bytes of one row and what belongs to a row alone."""
    one, six = (
        next(k for k in forward_kernels(tiny, Batch(8, n, 400), FUSED) if k.name == "attention") for n in (1, 6)
    )
    shape = tiny.plan.kv_shapes[0]
    entry = 2 * 2 * shape.num_kv_heads * shape.key_head_dim
    queries = 2 * 2 * TINY_TARGET.num_attention_heads * shape.key_head_dim
    assert one.num_bytes == 8 * 400 * entry + 8 * queries
    assert six.num_bytes == one.num_bytes + 5 * 8 * queries


def test_fused_layers_have_few_launches(tiny):
    """Present: 57 launches a layer, one per operation; long contexts of few sequences are merged by one launch more."""
    layers = {}
    for way in model_step.WAYS:
        counts = [
            sum(k.launches for k in forward_kernels(replace(tiny, num_layers=n), Batch(1, 6, 1024), way))
            for n in (5, 6)
        ]
        layers[way] = counts[1] - counts[0]
    assert layers[FUSED] <= 12
    assert layers[PRESENT] > 4 * layers[FUSED]


def test_time_is_the_larger_term_and_the_launches():
    device = Device(bandwidth=1e9, peak=1e12)
    assert Kernel("", 1000, 1, launches=1).seconds(device) == pytest.approx(3e-6)
    assert Kernel("", 1, 5e6, launches=3).seconds(device) == pytest.approx(11e-6)


def test_the_report_has_every_forward(tmp_path, capsys):
    file = tmp_path / "report.json"
    model_step.main(["--pair", "smoke", "--batch", "1,8", "--context", "300", "--kernels", "--json", str(file)])
    report = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == report
    assert report["computed"]
    assert "GFLOP" in printed
    for batch in report["batches"]:
        assert {(row["forward"], row["way"]) for row in batch["forwards"]} == {
            (name, way) for name in ("plain step", "verify", "draft forward") for way in model_step.WAYS
        }
        for row in batch["forwards"]:
            assert row["milliseconds"] > row["floor_milliseconds"] > 0
        for step in batch["steps"]:
            assert step["gain"] > 0


def test_bandwidth_replaces_that_of_the_data_sheet(capsys):
    model_step.main(["--pair", "smoke", "--batch", "1", "--bandwidth", "1000"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bandwidth"] == 1e12


@pytest.mark.parametrize(
    ("make", "known"),
    [(lambda: device_named("h300"), "h200"), (lambda: model_step.recorded_pair("qwen9", "bfloat16"), "qwen3-8b")],
)
def test_an_unknown_name_is_a_typed_error_that_names_the_known(make, known):
    with pytest.raises(ConfigError, match=known):
        make()


@pytest.mark.parametrize(
    "option", [["--device", "h300"], ["--pair", "x"], ["--batch", "0"], ["--context", "5"], ["--quantization", "int2"]]
)
def test_the_command_refuses(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        model_step.main(["--pair", "smoke", *option])
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("weights", grid(WEIGHTS, keep=["int4-a8", "fp8"]))
def test_a_forward_without_rows_reads_every_byte_of_quantised_weights_once(weights):
    """Those of an engine that rounds the same model, and of an output layer that fp8 leaves as it is."""
    shape = replace(TINY_TARGET, hidden_size=128, intermediate_size=256, num_hidden_layers=4)
    plain = parameter_bytes(shape, VOCAB)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape, VOCAB), dtype=torch.bfloat16)
    chosen = weights_to_round(model, "int8" if weights == FP8 else weights)
    if weights == FP8:
        chosen = [each for each in chosen if each.name != "lm_head.weight"]
        sizes = [panels_of(each.parameter) * (inputs + 4 * ceil(inputs / 128)) for each in chosen
                 for inputs in each.parameter.shape[1:]]  # fmt: skip
    else:
        sizes = [each.bytes_of(each.parameter) for each in chosen]
    kernels = forward_kernels(record(shape, VOCAB, torch.bfloat16, weights), Batch(0, 1, 8), FUSED)
    found = sum(kernel.num_bytes for kernel in kernels)
    assert found == plain - sum(each.parameter.nbytes for each in chosen) + sum(sizes)


def panels_of(parameter: torch.Tensor) -> int:
    """Outputs with those that fill the last panel."""
    return ceil(len(parameter) / 16) * 16


def test_rounding_rows_is_one_launch_more_and_fewer_bytes_to_multiply(tiny):
    kernels = {}
    for weights in ("int4", "int4-a8"):
        recorded = record(replace(TINY_TARGET, num_hidden_layers=5), VOCAB, torch.bfloat16, weights)
        kernels[weights] = forward_kernels(recorded, Batch(3, 2, 40), FUSED)
    linears = [each for each in kernels["int4"] if each.name.startswith("quantised linear")]
    rounding = [each for each in kernels["int4-a8"] if each.name == "rounding of rows"]
    assert len(linears) == len(rounding) == 5 * 7 + 1, "seven linears a layer, and the output layer"
    assert len(kernels["int4-a8"]) == len(kernels["int4"]) + len(rounding)
    bf16, blocks = 6 * 32 * 2, 6 * (32 + 4)
    assert rounding[0].num_bytes == bf16 + blocks
    first = next(each for each in kernels["int4-a8"] if each.name == linears[0].name)
    assert first.num_bytes == linears[0].num_bytes - bf16 + blocks
    assert first.flops == linears[0].flops


def test_quantised_weights_are_compared_with_those_as_they_are(capsys):
    model_step.main(["--pair", "smoke", "--batch", "1,8", "--quantization", "int4,fp8"])
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert "over unquantised" in printed
    rows = report["quantized"]
    assert [(row["weights"], row["batch_size"], row["forward"]) for row in rows] == [
        (weights, size, name) for weights in ("int4", "fp8") for size in (1, 8) for name in ("plain step", "verify")
    ]
    plain = {row["forward"]: row for row in report["batches"][1]["forwards"] if row["way"] == FUSED}
    gain = plain["verify"]["milliseconds"] / rows[3]["milliseconds"]
    assert rows[3]["gain"] == pytest.approx(gain, rel=1e-3), "both are rounded"


@pytest.mark.grid
def test_the_published_pair(capsys):
    """Bytes follow from the parameters, and the committed figures are those that the command computes."""
    pair = PAIRS["qwen3-8b"]
    for model, shape in zip(model_step.recorded_pair("qwen3-8b", "bfloat16"), (pair.target, pair.draft), strict=True):
        kernels = forward_kernels(model, Batch(0, 1, 8), FUSED)
        assert sum(kernel.num_bytes for kernel in kernels) == parameter_bytes(shape, pair.vocab_size)
    kinds = "int8,int4,int8-a8,int4-a8,fp8"
    model_step.main(["--pair", "qwen3-8b", "--batch", "1,8,32", "--quantization", kinds])
    committed = json.loads((ROOT / "bench/results/model-step-qwen3-8b-h200.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == committed
