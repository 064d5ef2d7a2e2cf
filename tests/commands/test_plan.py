"""The command ``plan``: what it prints runs within the budget, and what it refuses."""

from __future__ import annotations

import argparse
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.cli import main
from specdec_fast.commands import plan as plan_module
from specdec_fast.commands.plan import parse_bytes
from specdec_fast.models.rounded_models import rounded_copy
from specdec_fast.planner.checkpoint import checkpoint_sizes, copy_sizes
from specdec_fast.speculation_length.step_costs import StepCosts
from support.commands import DRAFT, EAGLE3, TARGET
from support.grids import grid
from support.recurrent_models import recurrent_config, recurrent_model

SHORT = {"prompt-tokens": 40, "new-tokens": 12}
HUGE = "1" * 400
COMPUTED = ["--no-measure", "--bandwidth", "100", "--peak", "1"]


def plan(*flags, draft=DRAFT, memory="20MB", **options):
    values = {"target": TARGET, "draft": draft, "memory": memory, **SHORT, **options}
    words = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return main(["plan", *words, *flags])


def planned(capsys, *flags, **options):
    assert plan("--json", *flags, **options) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *flags, **options):
    assert plan(*flags, **options) == 2
    return capsys.readouterr().err


@pytest.mark.grid
def test_the_planned_engine_runs_within_the_budget(capsys, monkeypatch):
    costs = StepCosts({1: 1.0, 64: 1.1}, {0: 0.0, 1: 0.01, 64: 0.01})  # constants under which drafting pays
    monkeypatch.setattr(plan_module.StepCosts, "measured", lambda *_: costs)
    report = planned(capsys, batch_sizes="1,2,4")
    assert any(batch["config"]["num_draft_tokens"] for batch in report["batches"])
    assert report["measured"]
    assert [batch["batch_size"] for batch in report["batches"]] == [1, 2, 4]
    assert report["best"]["tokens_per_second"] == max(batch["tokens_per_second"] for batch in report["batches"])
    for batch in report["batches"]:
        assert batch["bytes"] == sum(batch["terms"].values()) <= report["memory_bytes"] == 20_000_000
        engine = sd.Engine(TARGET, DRAFT, **batch["config"])
        assert engine.config.max_batch_size == batch["batch_size"]
        assert engine.config.kv_cache_tokens == batch["config"]["kv_cache_tokens"]
        outputs = engine.generate([[1] * 40] * 5, sd.SamplingParams(max_new_tokens=12, ignore_eos=True), progress=False)
        assert [len(output.token_ids) for output in outputs] == [12] * 5
        assert engine.last_run.num_preemptions == 0
        if batch["config"]["num_draft_tokens"]:
            assert engine.memory_plan.terms == batch["terms"]


def test_the_table_names_settings_terms_and_limits(capsys):
    assert plan(batch_sizes="1,2") == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^1 +\d +[\d.e+]+ +[\d.]+x +[\d.]+ +[\d.]+ MiB +\w+ \w+ +(reading weights|arithmetic)$", out, re.M
    )
    assert "Best: EngineConfig(max_batch_size=" in out
    assert re.search(r"^target weights +\d+$", out, re.M)
    assert "R* = " in out


def test_without_measuring_nothing_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(plan_module, "Engine", None)
    report = planned(capsys, *COMPUTED, batch_sizes="1,4,16")
    assert report["is_estimate"]
    assert not report["measured"]
    weights = report["best"]["terms"]["target weights"]
    assert report["rows_at_balance"] == pytest.approx(weights / 100e9 / (2 * 868_928 / 1e12), rel=0.1)
    assert report["fit"]["slope"] == pytest.approx(report["rows_at_balance"], rel=0.2)
    plain = planned(capsys, *COMPUTED, draft="none")
    assert plain["best"]["config"]["num_draft_tokens"] == 0
    assert planned(capsys, *COMPUTED, draft="ngram", batch_sizes=1)["best"]["config"]["num_draft_tokens"] == 8


def test_a_copy_of_the_target_has_its_codes_and_no_pages(capsys, monkeypatch):
    """Computed from the target's config, they are those of a loaded engine."""
    given = {"draft": "self", "dtype": "bfloat16", "batch_sizes": 1}
    engine = sd.Engine(TARGET, "self", dtype="bfloat16")
    monkeypatch.setattr(plan_module, "Engine", None)
    best = planned(capsys, *COMPUTED, **given)["best"]
    plain = planned(capsys, *COMPUTED, **given | {"draft": "ngram"})["best"]
    assert best["terms"]["drafter weights"] == engine.describe()["draft"]["own_weight_bytes"]
    assert best["terms"]["drafter KV"] == 0
    assert 0 < best["config"]["num_draft_tokens"] < plain["config"]["num_draft_tokens"], "drafting is not free"


@pytest.mark.parametrize("how", grid([COMPUTED, []], keep=[COMPUTED]), ids=["computed", "measured"])
def test_the_best_setting_has_what_the_command_line_set(capsys, monkeypatch, how):
    costs = StepCosts({1: 1.0, 64: 1.1}, {0: 0.0, 1: 0.01, 64: 0.01})
    monkeypatch.setattr(plan_module.StepCosts, "measured", lambda *_: costs)
    given = {"quantization": "int4-a8", "draft_quantization": "int8", "dtype": "bfloat16", "batch_sizes": 1}
    assert plan(*how, "--enforce-eager", **given) == 0
    shown = re.search(r"Best: (EngineConfig\(.*\))", capsys.readouterr().out)[1]
    config = eval(shown, {"EngineConfig": sd.EngineConfig})
    assert (config.quantization, config.draft_quantization) == ("int4-a8", "int8")
    assert (config.dtype, config.enforce_eager, config.device) == (torch.bfloat16, True, None)


@pytest.mark.parametrize("how", [COMPUTED, []], ids=["computed", "measured"])
def test_no_copy_is_planned_of_a_target_that_is_quantised_or_recurrent(capsys, tmp_path, how):
    """The engine refuses them."""
    assert "gains nothing beside quantization='int4'" in refused(capsys, *how, draft="self", quantization="int4")
    model = rounded_copy(AutoModelForCausalLM.from_pretrained(TARGET), "int8")
    with pytest.raises(sd.ConfigError, match=r"is quantised already \(int8\)"):
        copy_sizes(model, None, "int4")
    with pytest.raises(sd.ConfigError, match="advance the states"):
        copy_sizes(recurrent_model("mamba2"), None, "int4")


@pytest.mark.parametrize("draft", ["mtp", "eagle3:FOLDER"])
def test_without_measuring_no_drafter_is_free_because_it_is_unknown(capsys, draft):
    assert "its sizes are known only when it is loaded" in refused(capsys, *COMPUTED, draft=draft)


@pytest.mark.parametrize(("acceptance", "k"), [("1", 8), ("0", 0)])
def test_recurrent_states_are_those_of_each_setting(capsys, tmp_path, acceptance, k):
    """Known from the config alone: the folder has no weights."""
    recurrent_config("qwen3-next").save_pretrained(tmp_path)
    given = {"target": tmp_path, "draft": "ngram", "dtype": "float32", "acceptance": acceptance, "batch_sizes": 2}
    terms = planned(capsys, *COMPUTED, **given)["best"]["terms"]
    assert terms["target states"] == (4 + 1) * checkpoint_sizes(tmp_path, torch.float32).bytes_per_sequence(k)
    assert plan(*COMPUTED, **given) == 0
    assert re.search(rf"^target states +{terms['target states']}$", capsys.readouterr().out, re.M)
    assert "states" not in str(planned(capsys, *COMPUTED)["best"]["terms"])


@pytest.mark.grid
def test_a_planned_engine_of_hybrid_models_has_the_planned_terms(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("gc.collect", lambda: 0)  # takes most of the time
    costs = StepCosts({1: 1.0, 64: 1.1}, {0: 0.0, 1: 0.01, 64: 0.01})
    monkeypatch.setattr(plan_module.StepCosts, "measured", lambda *_: costs)
    acceptance = tmp_path / "report.json"
    acceptance.write_text(json.dumps({"acceptance": [1] + [0] * 7}))
    given = {"target": tmp_path / "target", "draft": tmp_path / "draft"}
    recurrent_model("qwen3.5").save_pretrained(given["target"])
    recurrent_model("mamba2").save_pretrained(given["draft"])
    (batch,) = planned(capsys, "--enforce-eager", **given, batch_sizes=2, acceptance=acceptance)["batches"]
    assert batch["num_draft_tokens"] == 1  # while the models were loaded with room for 8
    engine = sd.Engine(*given.values(), **batch["config"])
    assert engine.memory_plan.terms == batch["terms"]
    assert engine.memory_plan.terms["target states"]


def test_a_drafter_that_is_a_checkpoint_has_its_options(capsys):
    flags = ["--tap-layers", "1,2,3", "--draft-tree", "chain"]
    report = planned(capsys, *flags, draft=EAGLE3, batch_sizes=1)
    assert report["best"]["terms"]["target weights"] > 0
    assert "the taps of" in refused(capsys, "--tap-layers", "1,2,9", draft=EAGLE3)


def test_batch_sizes_that_do_not_fit_are_shown(capsys):
    report = planned(capsys, *COMPUTED, memory="8MB", batch_sizes="1,512")
    assert [batch["fits"] for batch in report["batches"]] == [True, False]
    assert plan(*COMPUTED, memory="8MB", batch_sizes="1,512") == 0
    assert "does not fit" in capsys.readouterr().out
    assert "none fits" in refused(capsys, *COMPUTED, memory="8MB", batch_sizes="512")


@pytest.mark.parametrize("flags", grid([[], COMPUTED], keep=[COMPUTED]))
def test_a_budget_that_holds_no_request_names_the_longest_prompt(capsys, flags):
    """What a config tells is a bound; when the models are loaded, the error has the exact number."""
    message, longest = r"lacks \d+ bytes .* the longest prompt that fits has (at most )?(\d+) tokens, with 12 new", 400
    refusals = 0
    while plan(*flags, memory=2_000_000, prompt_tokens=longest) == 2:
        longest = int(re.search(message, capsys.readouterr().err)[2])
        refusals += 1
    assert 1 <= refusals <= 2
    assert "longest prompt that fits" in refused(capsys, *flags, memory=2_000_000, prompt_tokens=longest + 1)


def test_acceptance_of_a_report(capsys, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"num_drafts": 10, "accepted_per_position": [9, 0]}))
    report = planned(capsys, *COMPUTED, acceptance=path, batch_sizes=1)
    assert report["acceptance"] == [0.9, *[0.0] * 7]
    assert report["best"]["num_draft_tokens"] <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [({"prompt_tokens": 0}, "--prompt-tokens=0"), ({"batch_sizes": "0,1"}, "--batch-sizes=0"),
     ({"prompt_tokens": 600}, "has 512 positions"), ({"acceptance": "2"}, "from 0 to 1"),
     ({"target": "no-such-model"}, "no-such-model"), ({"prompt_tokens": HUGE}, "expected an integer >= 1"),
     ({"batch_sizes": HUGE}, "expected an integer >= 1"), ({"acceptance": "nan"}, "from 0 to 1")],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_are_refused(capsys, options, message):
    assert message in refused(capsys, *COMPUTED, **options)


@pytest.mark.parametrize("value", ["nan", "inf", "-1.0", "1e-320"])
@pytest.mark.parametrize("name", ["bandwidth", "peak"])
def test_figures_that_no_device_has_are_refused(capsys, name, value):
    message = f"--{name} is {float(value)}, expected a number from 1e-06 to 1e+09"
    assert message in refused(capsys, *COMPUTED, f"--{name}={value}")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"acceptance":' * 100_000, '{"acceptance": ' + HUGE * 20 + "}", '{"acceptance": true}',
     '{"num_drafts": 1, "accepted_per_position": [' + HUGE + "]}", '{"rows": [1]}', '{"acceptance": NaN}'],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_reports_without_an_acceptance_are_refused(capsys, tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    assert "specdec-fast plan: acceptance " in refused(capsys, *COMPUTED, acceptance=path)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"layers":' * 100_000, '{"layers": [[' + HUGE + ",1],[2,2]]}", '{"layers": [[NaN,1],[2,2]]}',
     '{"layers": [[10,1e308],[2,-1e308]]}', '{"batch_sizes": [[1e-320,1],[2,2]]}', '{"layers": 5}'],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_curves_that_cannot_be_fitted_are_refused(capsys, tmp_path, text):
    path = tmp_path / "curves.json"
    path.write_text(text)
    for flags in ([], ["--json"]):
        assert main(["plan", "--fit", str(path), *flags]) == 2
        assert capsys.readouterr().err.startswith("specdec-fast plan: ")


def test_a_plan_for_ranks_counts_their_exchanges(capsys):
    needed = "needs --link-bandwidth (GB/s) and --link-latency (microseconds) of exchanges (--tp-size)"
    assert needed in refused(capsys, *COMPUTED, tp_size=2)
    slow, fast = (
        planned(capsys, *COMPUTED, batch_sizes="1", tp_size=2, link_bandwidth=10, link_latency=latency)
        for latency in (1000, 1)
    )
    num_layers = json.loads((demo_pair() / "target" / "config.json").read_text())["num_hidden_layers"]
    exchanges = 2 * num_layers + 2  # the attention and the MLP of every layer, embedding and output layer
    plain = [1 / each["batches"][0]["plain_tokens_per_second"] for each in (slow, fast)]
    assert plain[0] - plain[1] == pytest.approx(exchanges * 999e-6)
    assert slow["best"]["limit"] == "exchanges"


def test_missing_arguments_are_refused(capsys):
    assert main(["plan", "--target", TARGET, "--memory", "1GB"]) == 2
    assert "--draft is missing" in capsys.readouterr().err
    assert "needs --bandwidth" in refused(capsys, "--no-measure")


def test_curves_are_fitted(capsys, tmp_path):
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({"layers": [[1, 2], [10, 5]]}))
    assert main(["plan", "--fit", str(path)]) == 0
    assert re.search(r"^layers +3 +2 +1\.0000$", capsys.readouterr().out, re.M)
    assert main(["plan", "--fit", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"]["slope"] == pytest.approx(3)
    assert main(["plan", "--fit", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 << 30), ("1.5 GB", 1_500_000_000), ("100", 100), ("3kib", 3072), ("2MB", 2_000_000)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 TB!", "-1GB", "one", HUGE, f"{HUGE}GiB", "1e400"])
def test_sizes_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no size|is too much; expected less than 2\*\*63 bytes"):
        parse_bytes(text)
