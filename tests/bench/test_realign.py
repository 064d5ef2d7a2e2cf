"""The methods of realignment: what a drawn step is, what each method moves, no speed when one is wrong."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from bench import realign
from bench.realign_.memory import RESET, extra_bytes
from bench.realign_.methods import (
    Shape,
    Step,
    check,
    draw_steps,
    layers_of,
    layers_that_fit,
    measure,
    methods,
    repad_by_gather,
)
from specdec_fast.ops import all_ops
from specdec_fast.oracle.dense import RowMove, repad_in_place, repad_in_python

ACCEPTED = [30, 20, 10, 10, 10, 20]  # at index a, how often a of 5 draft tokens were accepted
COLUMNS = 64
SHAPE = Shape("small", 3, 2, 8, torch.bfloat16)
REALIGN_KV = all_ops()["realign_kv_"].load("torch")
METHODS = ["python", "gather", "fused", "engine"]


@pytest.fixture
def arguments(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One day"}\n{"prompt_ids": [0, 70, 71]}\n{"prompt": "Sums: 3"}\n')
    decoding = ["--prompts", str(path), "--decoding-batch-sizes", "2", "--max-new-tokens", "12"]
    timing = ["--shapes", "glm-4-9b,demo-pair", "--batch-sizes", "2,3", "--columns", "16", "--memory-gib", "0.002"]
    return [*decoding, *timing, "--repeats", "1"]


@pytest.fixture
def _no_new_processes(monkeypatch):
    """Start no processes, which take seconds each; the test of the memory covers them."""
    monkeypatch.setattr(realign, "extra_bytes", lambda *args: None)
    monkeypatch.setattr(realign, "in_subprocess", lambda function, *args: function(*args))


@pytest.mark.grid
@pytest.mark.usefixtures("_no_new_processes")
def test_last_line_is_the_report(arguments, capsys, tmp_path):
    path = tmp_path / "realign.json"
    realign.main([*arguments, "--json", str(path)])
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert report == json.loads(path.read_text())
    assert "not measured here" in out
    measured = [(row["shape"], row["batch"], row["method"]) for row in report["rows"]]
    assert measured == [(s, b, m) for s in ("glm-4-9b", "demo-pair") for b in (2, 3) for m in METHODS]
    for row in report["rows"]:
        nothing = row["method"] == "engine"
        assert (row["milliseconds"] == 0) == (row["bytes_moved"] == 0) == nothing
        for ratio in ("time_over_memcpy", "op_over_memcpy"):
            assert (row[ratio] is None) == (row["method"] != "fused")
    assert report["rows"][0]["layers"] < report["rows"][0]["of_layers"] == 40, (
        "the memory budget is too small for all layers"
    )
    assert len(report["acceptance"]["accepted_counts"]) == 6
    moved = {row["method"]: row["moved_bytes_per_step"] for row in report["steps"]}
    assert moved["oracle-eqspec-python"] == moved["oracle-eqspec-gather"] == moved["oracle-eqspec-fused"] > 0
    assert moved["oracle-exspec-python"] == moved["oracle-exspec-gather"] == moved["oracle-exspec-fused"]
    shares = {row["method"]: row["realign_share"] for row in report["steps"]}
    for method in ("engine-eqspec", "engine-exspec"):
        assert moved[method] == shares[method] == 0
    assert 0 < shares["oracle-eqspec-python"] < 1


def leaves_all(layers, starts, lengths, shifts):
    pass


def leaves_the_last_layer(layers, starts, lengths, shifts):
    REALIGN_KV(layers[:-1], starts, lengths, shifts)


def leaves_the_values(layers, starts, lengths, shifts):
    REALIGN_KV([(keys, values.clone()) for keys, values in layers], starts, lengths, shifts)


def one_column_short(layers, starts, lengths, shifts):
    REALIGN_KV(layers, starts, (lengths - 1).clamp_min(0), shifts)


def overwrites_before_it_reads(layers, starts, lengths, shifts):
    """Column by column from the left: right only for moves to the left."""
    for row, (start, length, shift) in enumerate(zip(starts.tolist(), lengths.tolist(), shifts.tolist(), strict=True)):
        for tensor in (tensor for layer in layers for tensor in layer):
            for column in range(start, start + length):
                tensor[row, :, column + shift] = tensor[row, :, column]


WRONG = [leaves_all, leaves_the_last_layer, leaves_the_values, one_column_short, overwrites_before_it_reads]


@pytest.mark.parametrize("wrong", WRONG)
def test_gate_rejects(wrong):
    steps = draw_steps(ACCEPTED, 4, COLUMNS, 2)
    repads = methods(REALIGN_KV) | {"fused": repad_in_place(wrong)}
    assert check(repads, SHAPE, 2, steps) == "fused leaves other KV entries than python does"
    assert check(methods(REALIGN_KV), SHAPE, 2, steps) is None


@pytest.mark.usefixtures("_no_new_processes")
def test_no_speed_when_a_method_is_wrong(arguments, monkeypatch, capsys):
    monkeypatch.setattr(realign, "methods", lambda op: methods(op) | {"fused": repad_in_place(leaves_all)})
    with pytest.raises(SystemExit, match="glm-4-9b at batch 2: fused leaves other KV entries"):
        realign.main(arguments)
    out = capsys.readouterr().out
    assert "ms" not in out
    assert "milliseconds" not in out


@pytest.mark.grid
@pytest.mark.usefixtures("_no_new_processes")
def test_no_speed_when_a_decoding_run_is_wrong(arguments, monkeypatch, capsys):
    def wrong_only_when_decoding(layers, moves, num_columns):
        moved = repad_in_python(layers, moves, num_columns)
        return [(k.roll(1, dims=2), v) for k, v in moved] if layers[0][0].is_inference() else moved

    monkeypatch.setattr(realign, "methods", lambda op: {**methods(op), "gather": wrong_only_when_decoding})
    with pytest.raises(SystemExit, match=r"oracle-\w+-gather at batch 2: \d outputs differ"):
        realign.main([*arguments, "--max-new-tokens", "40"])
    assert "ms" not in capsys.readouterr().out


@pytest.mark.parametrize("batch_size", [2, 8, 32])
def test_a_drawn_step_is_a_realignment(batch_size):
    steps = draw_steps(ACCEPTED, batch_size, COLUMNS, 20)
    assert [step.moves for step in steps] == [step.moves for step in draw_steps(ACCEPTED, batch_size, COLUMNS, 20)]
    for step in steps:
        assert step.cache_columns == COLUMNS + 5  # a column for every row of the verification but the newest token's
        assert min(move.start for move in step.moves) == 0, "the longest row has no padding"
        for move in step.moves:
            assert move.start + move.shift + move.length == step.num_columns, "all rows end in the same column"
            assert move.start + move.shift >= 0
            assert max(move.start + move.length, step.num_columns) <= step.cache_columns
            assert 1 <= step.num_columns + 1 - COLUMNS - move.shift <= 6, "emitted = growth - shift"
        assert any(move.shift for move in step.moves)
    assert any(a.moves != b.moves for a, b in pairwise(steps))
    assert len({move.start for move in steps[0].moves}) > 1, "the batch is ragged"


def test_draws_follow_the_distribution():
    """Four draft tokens or none, one row in four none: a row that moved most emitted one token."""
    steps = draw_steps([1, 0, 0, 0, 3], 16, COLUMNS, 400)
    growths = [step.num_columns + 1 - COLUMNS for step in steps]
    pairs = list(zip(steps, growths, strict=True))
    emitted = [growth - move.shift for step, growth in pairs for move in step.moves]
    assert set(emitted) == {1, 5}
    share, num = emitted.count(1) / len(emitted), len(emitted)
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / num) ** 0.5  # four standard deviations


@pytest.mark.parametrize(("counts", "batch_size"), [(ACCEPTED, 1), ([0, 7, 0], 4)])
def test_steps_that_can_never_move_are_refused(counts, batch_size):
    with pytest.raises(ValueError, match="nothing ever moves"):
        draw_steps(counts, batch_size, COLUMNS, 1)


def test_bytes_are_those_that_each_method_writes():
    """Rows of 5 and 3 columns, the second moves; the result has 6. 2 layers of keys and values, 2 heads x 8, bf16."""
    step = Step([RowMove(1, 5, 0), RowMove(2, 3, 1)], 6, 7)
    rows = {row["method"]: row for row in measure(methods(REALIGN_KV), REALIGN_KV, SHAPE, 2, [step])}
    per_column = 2 * 2 * 2 * 8 * 2
    written = {"python": 8, "gather": 12, "fused": 3, "engine": 0}
    assert {method: row["bytes_moved"] for method, row in rows.items()} == {
        m: n * per_column for m, n in written.items()
    }


def test_gather_moves_every_entry_of_any_layout():
    step = draw_steps(ACCEPTED, 3, COLUMNS, 1)[0]
    layers = layers_of(torch.randn(2, 2, 3, 2, step.cache_columns + 4, 8))
    cropped = [(k[:, :, : step.cache_columns], v[:, :, : step.cache_columns]) for k, v in layers]
    got = repad_by_gather(cropped, step.moves, step.num_columns)
    expected = repad_in_python(cropped, step.moves, step.num_columns)
    for row, move in enumerate(step.moves):
        for pair, wanted in zip(got, expected, strict=True):
            for tensor, truth in zip(pair, wanted, strict=True):
                assert torch.equal(tensor[row, :, move.start + move.shift :], truth[row, :, move.start + move.shift :])


def test_layers_fit_the_memory():
    per_layer = 4 * COLUMNS * SHAPE.bytes_per_column  # of one copy of the cache; at most three exist at once
    assert layers_that_fit(SHAPE, 4, COLUMNS, 3 * 2 * per_layer) == 2
    assert layers_that_fit(SHAPE, 4, COLUMNS, 3 * per_layer - 1) == 0
    assert layers_that_fit(SHAPE, 4, COLUMNS, 1 << 40) == SHAPE.num_layers


@pytest.mark.grid
def test_memory_beyond_the_cache():
    """The Python loops build a second cache; the op in place needs less than a megabyte (its C++ half: nothing)."""
    if not RESET.exists():
        pytest.skip("this system does not report the peak memory of a process")
    step = draw_steps(ACCEPTED, 4, COLUMNS, 1)[0]
    shape = Shape("wide", 4, 32, 64, torch.float32)  # 16 MB
    cache_bytes = 4 * 4 * step.cache_columns * shape.bytes_per_column
    assert extra_bytes("python", "torch", shape, 4, step) > 0.8 * cache_bytes
    backend = "torch" if all_ops()["realign_kv_"].why_unavailable("cpp") else "cpp"
    assert extra_bytes("fused", backend, shape, 4, step) < 1e6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "abacus"], "--shapes: abacus; expected some of vicuna-7b"),
        (["--batch-sizes", "1,2"], "a batch of one row is never realigned"),
    ],
)
def test_options_that_cannot_be_served(options, message, capsys):
    with pytest.raises(SystemExit):
        realign.main(options)
    assert message in capsys.readouterr().err


@pytest.mark.grid
@pytest.mark.usefixtures("_no_new_processes")
def test_plot(arguments, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "methods.png"
    realign.main([*arguments, "--shapes", "demo-pair", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
