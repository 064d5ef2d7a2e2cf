"""How the benchmark of whole runs runs its methods: batches, pools, drafts, prompts and EOS."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench import engine as bench
from bench.common.workload import Workload, load
from bench.engine_.methods import Bench
from support.engine_bench import DEFAULT, workload


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


@pytest.mark.grid
@pytest.mark.parametrize("ignore", [False, True])
def test_ignored_eos_ends_no_text(tmp_path, ignore):
    path = tmp_path / "early.jsonl"  # it ends after ten tokens
    prompt = "Items: owl, green, hen, box, grey, key.\nReversed: key, grey, box, hen, green, owl.\nSorted: box, green,"
    path.write_text(json.dumps({"prompt": prompt}))
    options = ["--prompts", str(path), "--max-new-tokens", "16", *(["--ignore-eos"] if ignore else [])]
    found = Bench(load(bench.parse_args(options), 0)).method_settings(DEFAULT, [1], [5], [None])
    lengths = {setting.name: [len(tokens) for tokens in setting.run().outputs] for setting in found}
    assert lengths == {name: [16 if ignore else 10] for name in DEFAULT}


def test_determinism_can_be_left_out():
    for deterministic in (True, False):
        engine = Bench(workload(), deterministic=deterministic).method_setting("eqspec", 2, 3).run.engine
        assert engine.describe()["deterministic"] is deterministic
