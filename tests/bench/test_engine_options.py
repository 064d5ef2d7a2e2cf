"""The command line of the benchmark of whole runs: what can be asked for, and what is refused with a reason."""

from __future__ import annotations

import pytest

from bench import engine as bench
from bench.common import report
from bench.engine_.methods import Bench
from support.engine_bench import DEFAULT, SMOKE, workload


@pytest.mark.parametrize(("text", "wanted"), [("5", [5]), ("0,3,auto", [0, 3, "auto"]), ("auto", ["auto"])])
def test_numbers_of_draft_tokens(text, wanted):
    args = bench.parse_args(["--num-draft-tokens", text])
    assert args.num_draft_tokens == wanted == report.draft_tokens(text)


def test_auto_is_for_the_engine_only(monkeypatch):
    monkeypatch.setattr(Bench, "_runner", lambda self, *args: lambda: None)
    found = Bench(workload()).method_settings(DEFAULT, [1], ["auto", 0, 3], [None])
    asked = {}
    for setting in found:
        asked.setdefault(setting.name, []).append(setting.num_draft_tokens)
    assert asked["eqspec"] == asked["exspec"] == ["auto", 0, 3]
    assert asked["oracle-eqspec"] == asked["oracle-exspec"] == asked["transformers-assisted"] == [3]
    assert asked["autoregressive"] == asked["transformers"] == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-draft-tokens", "5,many"], "'many': expected integers from 0 on, or auto"),
        (["--num-draft-tokens", "-1"], "expected"),
        (["--acceptance", "0.5,1.5"], "expected numbers from 0 to 1"),
        (["--methods", "eqspec,vllm"], "--methods: vllm; expected some of autoregressive"),
        (["--acceptance", "0.8", "--methods", "oracle-eqspec,eqspec"], "--acceptance: oracle-eqspec would run"),
        (["--acceptance", "0", "--methods", "transformers-assisted"], "cannot be replayed there"),
        (["--eagle3", "50"], "--eagle3: its weights are random, so nothing would be accepted; add --acceptance"),
        (["--repeats", "0"], "expected 1 or more"),
        (["--times", "0"], "--times 0: expected 1 or more"),
    ],
)
def test_options_that_cannot_be_served(options, message, capsys):
    with pytest.raises(SystemExit):
        bench.parse_args(options)
    assert message in capsys.readouterr().err


def test_a_pair_that_cannot_be_run_is_explained(demo):
    with pytest.raises(SystemExit, match=r"cannot load 'nowhere' \(there is no such folder\)"):
        bench.main([*demo, "--target", "nowhere", "--draft", "nowhere"])


@pytest.mark.parametrize("num_ids", [0, -5, 98])
def test_ids_that_an_eagle3_layer_cannot_have(num_ids):
    with pytest.raises(SystemExit, match=f"{num_ids} ids; expected 1 to 97"):
        bench.main([*SMOKE, "--acceptance", "1", "--batch-sizes", "1", "--eagle3", str(num_ids)])


def test_nothing_to_run_is_an_error(capsys):
    options = [*SMOKE, "--methods", "transformers-assisted", "--batch-sizes", "2"]
    with pytest.raises(SystemExit, match="transformers-assisted cannot be run with these"):
        bench.main(options)
