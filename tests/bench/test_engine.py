"""The benchmark of whole runs: what it measures, what its figures mean, and no speed when an output is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from bench import engine as bench
from bench.common import report
from bench.common.measurement import (
    Measurement,
    MethodSetting,
    measure,
)
from bench.common.pairs import PAIRS, random_pair, random_prompts
from bench.common.workload import Workload, load
from bench.engine_.methods import METHODS, Bench
from bench.engine_.peers import PEERS
from bench.engine_.summary import STAGES
from specdec_fast import Engine, oracle

CPU = torch.device("cpu")
SMOKE = ["--pair", "smoke", "--prompt-tokens", "5", "--max-new-tokens", "8", "--repeats", "1"]
DEFAULT = [
    "autoregressive",
    "eqspec",
    "exspec",
    "oracle-eqspec",
    "oracle-exspec",
    "transformers",
    "transformers-assisted",
]


@pytest.fixture
def demo(tmp_path):
    """Options that decode three prompts with the bundled pair."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One day"}\n{"prompt_ids": [0, 70, 71]}\n{"prompt": "Sums: 3"}\n')
    return ["--prompts", str(path), "--batch-sizes", "2", "--repeats", "1", "--max-new-tokens", "16"]


def run(capsys, options):
    """Run the command; return its tables and its last line."""
    bench.main(options)
    *text, last = capsys.readouterr().out.splitlines()
    return "\n".join(text), json.loads(last)


def workload(count=5, new_tokens=12, dtype=torch.float32):
    target, draft = random_pair(PAIRS["smoke"], dtype, CPU)
    return Workload("smoke", target, draft, random_prompts(count, 5, 97), new_tokens)


# A whole run


@pytest.fixture(scope="module")
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
    assert rows["eqspec", 1.0]["mean_acceptance_length"] == 4, "8 tokens are two full steps"
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
    assert row["mean_acceptance_length"] == 4, "8 tokens are two full steps"
    assert result["eagle3_ids"] == num_ids
    drafter = next(engine.drafter.inner for engine in made if engine.drafter.taps)
    assert drafter.describe()["draft_vocab_size"] == num_ids
    assert drafter.model.hidden_size == PAIRS["smoke"].target.hidden_size
    assert drafter.pool is None, "its pool is freed between runs"


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    run(capsys, [*SMOKE, "--methods", "autoregressive,eqspec", "--batch-sizes", "1,2", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")


# The gate


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


# How methods are run


def test_grouping_is_seen_before_each_step():
    """Nothing is accepted, so prompts of one length stay of one length, and others never meet."""
    for prompts, rate in (([[1, 2]] * 4, 1.0), ([[1, 2], [1, 2, 3], [4], [5, 6, 7, 8]], 0.0)):
        base = replace(workload(), prompts=prompts)
        assert Bench(base).method_setting("eqspec", 4, 3, 0.0).run().grouping_rate == rate


def test_engine_gives_its_kv_back_between_runs_and_finds_it_made():
    setting = Bench(workload()).method_setting("exspec", 2, 3)
    runner = setting.run
    first, second = runner(), runner()
    assert runner.engine.core.pool is runner.drafter.pool is None
    assert (first.outputs, first.kv_bytes) == (second.outputs, second.kv_bytes)
    seen = []
    stream = runner.engine.stream
    runner.engine.stream = lambda *args: seen.append((runner.engine.core.pool, runner.drafter.pool)) or stream(*args)
    runner()
    assert all(pool is not None for pool in seen[0]), "made before the clock starts"


def test_batches_of_transformers_end_together():
    run = Bench(workload()).method_setting("transformers", 2).run()
    a, b, c, d, e = run.latencies
    assert a == b < c == d < e == run.seconds


def test_assisted_generation_drafts_as_many_as_asked(target, draft, tokenizer):
    bundled = Workload(
        "demo", target, draft, [tokenizer("Repeat 6 times: plum fig.\n1. plum fig\n2. plum").input_ids], 20
    )
    forwards = []
    hook = target.register_forward_hook(lambda *args: forwards.append(1))
    counted, outputs = {}, []
    for k in (1, 6):
        forwards.clear()
        outputs.append(Bench(bundled).method_setting("transformers-assisted", 1, k).run().outputs)
        counted[k] = len(forwards)
    hook.remove()
    assert outputs == [Bench(bundled).method_setting("transformers", 1).run().outputs] * 2
    assert 0 < counted[6] < counted[1] / 2, "the more tokens are drafted, the fewer verifications there are"


def test_prompts_can_be_decoded_several_times_over():
    once, thrice = (
        load(bench.parse_args(["--pair", "smoke", "--num-prompts", "2", *times]), 0) for times in ([], ["--times", "3"])
    )
    assert thrice.prompts == once.prompts * 3


@pytest.mark.parametrize("ignore", [False, True])
def test_ignored_eos_ends_no_text(tmp_path, ignore):
    path = tmp_path / "early.jsonl"  # it ends after ten tokens
    prompt = "Items: owl, green, hen, box, grey, key.\nReversed: key, grey, box, hen, green, owl.\nSorted: box, green,"
    path.write_text(json.dumps({"prompt": prompt}))
    options = ["--prompts", str(path), "--max-new-tokens", "16", *(["--ignore-eos"] if ignore else [])]
    found = Bench(load(bench.parse_args(options), 0)).method_settings(DEFAULT, [1], [5], [None])
    lengths = {setting.name: [len(tokens) for tokens in setting.run().outputs] for setting in found}
    assert lengths == {name: [16 if ignore else 10] for name in DEFAULT}


# The command line


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


def test_determinism_can_be_left_out():
    for deterministic in (True, False):
        engine = Bench(workload(), deterministic=deterministic).method_setting("eqspec", 2, 3).run.engine
        assert engine.describe()["deterministic"] is deterministic


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
