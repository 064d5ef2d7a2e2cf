"""``bench.forwards`` times all ways to run a forward on the same rows, and reports no time for a wrong one."""

from __future__ import annotations

import json

import pytest
import torch

from bench import forwards
from bench.common.pairs import PAIRS, random_pair
from specdec_fast.ops.registry import all_ops

pytestmark = pytest.mark.skipif(
    all_ops()["linear"].why_unavailable("cpp") is not None, reason="programs run in the C++ extension"
)
SMALL = ["--pair", "smoke", "--batch-sizes", "1,3", "--num-draft-tokens", "2", "--context", "20", "--repeats", "2"]
PREFILL = ["--prefill", "24,1000000"]  # the second has more rows than the model has positions


@pytest.mark.grid
def test_all_ways_are_timed(tmp_path, capsys):
    file = tmp_path / "forwards.json"
    forwards.main([*SMALL, *PREFILL, "--json", str(file)])
    report = json.loads(file.read_text())
    shapes = [(row["model"], row["batch_size"], row["rows_per_sequence"], row["context"]) for row in report["rows"]]
    steps = [(b, n, 20) for b in (1, 3) for n in (1, 3)]
    assert shapes == [(model, *shape) for model in ("target", "draft") for shape in (*steps, (1, 24, 24))]
    for row in report["rows"]:
        assert row["program_milliseconds"] > 0
        assert row["eager_milliseconds"] > 0
        assert row["transformers_milliseconds"] > 0
        assert row["logit_distance"] < 1e-5
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


def test_the_unmodified_model_is_transformers_own():
    """None of our code runs in it, and a second call gives the same: its cache is cut back to the context."""
    model = random_pair(PAIRS["smoke"], torch.float32, torch.device("cpu"))[0]
    calls = forwards.Forwards(model).calls(forwards.Shape(2, 3, 9))
    token_ids = torch.arange(18).view(2, 9) % model.config.vocab_size
    with torch.inference_mode():
        expected = model(input_ids=token_ids, use_cache=False).logits[:, -3:].flatten(0, 1)
    for _ in range(2):
        assert torch.allclose(calls[forwards.UNMODIFIED](), expected, rtol=1e-4, atol=1e-5)


def test_one_model_can_be_left_out(capsys):
    forwards.main([*SMALL, "--prefill", "8", "--models", "draft"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["model"] for row in report["rows"]} == {"draft"}


def test_wrong_logits_have_no_speed(monkeypatch):
    right = dict.fromkeys((forwards.EAGER, forwards.UNMODIFIED), lambda: torch.full((2, 3), 1.01))
    apart = {forwards.PROGRAM: lambda: torch.ones(2, 3), **right}
    monkeypatch.setattr(forwards.Forwards, "calls", lambda *args: apart)
    with pytest.raises(SystemExit, match="no speed is reported"):
        forwards.main(SMALL)
