"""The benchmark of whole runs: what it measures, and what its figures mean."""

from __future__ import annotations

import json

import pytest

from bench import engine as bench
from bench.common.pairs import PAIRS
from bench.engine_.summary import STAGES
from specdec_fast import Engine
from support.engine_bench import DEFAULT, SMOKE, run


@pytest.fixture(scope="module", params=[pytest.param(None, id="whole run", marks=pytest.mark.grid)])
def smoke(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "out.json"
    bench.main([*SMOKE, "--batch-sizes", "1,3", "--num-draft-tokens", "2,4", "--json", str(path)])
    return json.loads(path.read_text())


def test_every_method_at_every_batch_with_every_k(smoke):
    got = [(row["batch_size"], row["method"], row["num_draft_tokens"]) for row in smoke["rows"]]
    wanted = []
    for batch_size in (1, 3):
        for method in DEFAULT:
            if method != "transformers-assisted" or batch_size == 1:
                wanted += [(batch_size, method, k) for k in ([2, 4] if "spec" in method or "ass" in method else [None])]
    assert got == wanted
    assert (smoke["reference"], smoke["prompts"], smoke["pair"]) == ("transformers", 6, "smoke")
    assert smoke["ignore_eos"] is True


def test_figures_of_a_run_agree_with_each_other(smoke):
    num_tokens = smoke["prompts"] * smoke["max_new_tokens"]
    for row in smoke["rows"]:
        assert row["tokens_per_second"] > 0
        assert row["equal_share"] == 1
        if row["latency_seconds"]:
            p50, p90, p99 = (row["latency_seconds"][p] for p in ("p50", "p90", "p99"))
            assert 0 < p50 <= p90 <= p99 <= 1.001 * num_tokens / row["tokens_per_second"]
        if row["stage_shares"]:
            assert list(row["stage_shares"]) == list(STAGES)
            assert sum(row["stage_shares"].values()) == pytest.approx(1, abs=2e-3)
            assert 0 < row["stage_shares"]["host"] <= 1  # the rest depends on the machine
            counts = row["accepted_histogram"]
            assert len(counts) == (row["num_draft_tokens"] or 0) + 1
            accepted = sum(a * count for a, count in enumerate(counts))
            assert row["mean_acceptance_length"] == pytest.approx(1 + accepted / sum(counts), rel=1e-3)
            assert accepted + sum(counts) >= num_tokens, "every step emits the accepted tokens and one more"
        else:
            assert row["method"].startswith("transformers")


def test_speedups_are_reported_where_both_were_run(smoke):
    for row in smoke["rows"]:
        assert row["speedup_over_plain"] > 0
        assert (row["speedup_over_oracle"] is None) == (row["method"] not in ("eqspec", "exspec"))
        if row["method"] == "autoregressive":
            assert row["speedup_over_plain"] == 1
            assert (row["speedup_over_plain_batch_1"] == 1) == (row["batch_size"] == 1)
        if row["method"] == "transformers":
            assert row["speedup_over_transformers"] == 1


def test_kv_belongs_to_the_engine_and_moving_it_to_the_oracle(smoke):
    # 5 + 8 - 1 positions are one page of 16; numbers of a position: 2 layers x 2 x 2 heads x 16, and 1 x 2 x 1 x 16
    target, draft = 16 * 4 * 128, 16 * 4 * 32
    kv_bytes = {(row["method"], row["batch_size"]): row["kv_bytes"] for row in smoke["rows"]}
    assert kv_bytes["autoregressive", 3] == 3 * target
    assert kv_bytes["eqspec", 1] == target + draft
    assert kv_bytes["eqspec", 3] == 3 * (target + draft)
    assert kv_bytes["exspec", 3] == 6 * (target + draft), "its window holds two batches"
    assert kv_bytes["oracle-eqspec", 3] is kv_bytes["transformers", 3] is None
    for row in smoke["rows"]:
        if row["method"] in ("eqspec", "exspec", "autoregressive"):
            assert row["moved_bytes"] == 0
            assert 0 <= row["grouping_rate"] <= 1
        assert (row["equal_length_steps"] is None) == row["method"].startswith("transformers")


@pytest.mark.grid
def test_demo_pair_prints_tables_and_ends_in_the_report(demo, capsys):
    text, result = run(capsys, demo)
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == DEFAULT[:-1], "assisted generation has batch 1 only, and is left out at others"
    assert rows["oracle-eqspec"]["moved_bytes"] > 0 == rows["eqspec"]["moved_bytes"]
    assert rows["eqspec"]["mean_acceptance_length"] > 1.5
    assert rows["eqspec"]["speedup_over_plain_batch_1"] is None
    for column in ("x plain", "x same oracle", "x transformers", "P99 s", "outside forwards", "MB of KV", "grouped"):
        assert column in text
    assert "3 prompts of 3 to" in text


def test_replayed_acceptances_share_an_engine(capsys, monkeypatch):
    made = []
    monkeypatch.setattr("bench.engine_.methods.Engine", lambda *args, **kw: made.append(args) or Engine(*args, **kw))
    options = ["--acceptance", "1,0", "--batch-sizes", "2", "--num-draft-tokens", "3"]
    text, result = run(capsys, [*SMOKE, *options])
    rows = {(row["method"], row["acceptance"]): row for row in result["rows"]}
    drafting = [(method, p) for method in ("eqspec", "exspec") for p in (1.0, 0.0)]
    assert list(rows) == [("autoregressive", None), *drafting, ("transformers", None)]
    assert rows["eqspec", 0.0]["mean_acceptance_length"] == 1
    assert rows["eqspec", 1.0]["mean_acceptance_length"] == 4, "9 tokens are the first one and two full steps"
    assert "replayed" in text
    assert len(made) == 4, "plain for the transcripts and for batch 2, eqspec, exspec"
    assert len({id(args[0]) for args in made}) == len({id(args[1]) for args in made if args[1] is not None}) == 1


@pytest.mark.parametrize("num_ids", [97, 50])
def test_an_eagle3_layer_of_random_weights_is_replayed(num_ids, capsys, monkeypatch):
    made = []

    def make(*args, **kwargs):
        made.append(Engine(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("bench.engine_.methods.Engine", make)
    options = ["--acceptance", "1", "--batch-sizes", "2", "--num-draft-tokens", "3", "--eagle3", str(num_ids)]
    _, result = run(capsys, [*SMOKE, *options, "--methods", "autoregressive,exspec"])
    row = next(row for row in result["rows"] if row["method"] == "exspec")
    assert row["mean_acceptance_length"] == 4, "9 tokens are the first one and two full steps"
    assert result["eagle3_ids"] == num_ids
    drafter = next(engine.drafter.inner for engine in made if engine.drafter.taps)
    assert drafter.describe()["draft_vocab_size"] == num_ids
    assert drafter.model.hidden_size == PAIRS["smoke"].target.hidden_size
    assert drafter.pool is None, "its pool is freed between runs"


@pytest.mark.grid
def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    run(capsys, [*SMOKE, "--methods", "autoregressive,eqspec", "--batch-sizes", "1,2", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
