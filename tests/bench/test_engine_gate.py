"""The correctness gate of the benchmark of whole runs: no speed when an output is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import engine as bench
from bench.common.measurement import Measurement, MethodSetting, measure
from bench.engine_.methods import METHODS, Bench
from bench.engine_.peers import PEERS
from specdec_fast import Engine, oracle
from support.engine_bench import SMOKE, run, workload


def wrong_stream(self, *args, **kwargs):
    """Stream what the engine does, but with another token at one place of the second prompt."""
    for chunk in STREAM(self, *args, **kwargs):
        last = chunk.index == 1 and chunk.finish_reason is not None
        yield replace(chunk, token_ids=[*chunk.token_ids[:-1], chunk.token_ids[-1] + 1]) if last else chunk


STREAM = Engine.stream


def test_no_speed_when_an_output_of_the_engine_is_wrong(demo, capsys, monkeypatch):
    monkeypatch.setattr(Engine, "stream", wrong_stream)
    with pytest.raises(SystemExit, match="autoregressive at batch 2: 1 outputs differ from transformers at batch 1"):
        bench.main(demo)
    assert "tokens/s" not in capsys.readouterr().out


def wrong_oracle(*args, **kwargs):
    run = EQSPEC(*args, **kwargs)
    run.outputs[0][-1] += 1
    return run


EQSPEC = oracle.eqspec


@pytest.mark.grid
def test_a_wrong_oracle_fails_fp32_and_is_reported_in_bf16(capsys, monkeypatch):
    monkeypatch.setattr(oracle, "eqspec", wrong_oracle)
    options = [*SMOKE, "--batch-sizes", "2", "--methods", "oracle-eqspec,eqspec"]
    with pytest.raises(SystemExit, match="oracle-eqspec, K 5 at batch 2: 2 outputs differ"):  # of two batches
        bench.main(options)
    assert "tokens/s" not in capsys.readouterr().out
    text, result = run(capsys, [*options, "--dtype", "bfloat16"])
    assert result["reference"] == "autoregressive"
    equal = {row["method"]: (row["equal_share"], row["gated"]) for row in result["rows"]}
    assert equal == {"oracle-eqspec": (0.5, False), "eqspec": (1.0, True)}
    assert "50.0%*" in text


@pytest.mark.grid
def test_which_methods_are_compared_with_the_reference(monkeypatch):
    for name, peer in PEERS.items():  # whether they are installed or not
        monkeypatch.setitem(PEERS, name, replace(peer, make=lambda workload, models: print))
    gated = {}
    for dtype in (torch.float32, torch.bfloat16):
        settings = Bench(workload(dtype=dtype)).method_settings(list(METHODS), [1, 2], [3], [None])
        gated[dtype] = {(c.name, c.batch_size) for c in settings if c.gated}
    engine = {(m, b) for m in ("autoregressive", "autoregressive-exspec", "eqspec", "exspec") for b in (1, 2)}
    oracles = {(m, b) for m in ("oracle-eqspec", "oracle-exspec") for b in (1, 2)}
    assert gated[torch.float32] == engine | oracles | {("transformers", 1), ("transformers-assisted", 1)}
    assert gated[torch.bfloat16] == engine


def test_reference_is_measured_once_and_only_on_request():
    bench_of = {dtype: Bench(workload(dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)}
    for dtype, name in ((torch.float32, "transformers"), (torch.bfloat16, "autoregressive")):
        settings = list(
            bench_of[dtype].method_settings(["eqspec", "transformers", "autoregressive"], [2, 1], [3], [None])
        )
        reference = bench_of[dtype].reference(settings)
        assert (reference.name, reference.batch_size) == (name, 1)
        assert reference in settings
        other = bench_of[dtype].reference([c for c in settings if c is not reference])
        assert (other.name, other.batch_size) == (name, 1)


def scripted(name, *outputs, gated=True):
    """A setting that emits ``outputs``, run after run."""
    ran = iter(outputs)
    return MethodSetting(name, 1, lambda: Measurement(next(ran), 1.0, {}, 0, 1), gated=gated)


def test_warm_up_is_compared_with_the_reference_but_not_measured():
    right, wrong = [[1], [2]], [[1], [3]]
    with pytest.raises(SystemExit, match="b at batch 1: 1 outputs differ from a"):
        measure([scripted("a", right, right), scripted("b", wrong, right)], 1)
    with pytest.raises(SystemExit, match="b at batch 1: 1 outputs differ from a"):
        measure([scripted("a", right, right), scripted("b", right, wrong)], 1)
    reported = scripted("b", right, wrong, right, gated=False)
    runs = measure([reported], 2, reference=scripted("a", right))
    assert [m.equal_share for m in runs[reported]] == [0.5, 1.0]
