"""``bench.gpu`` at tiny sizes on the CPU: every task measures, and what is broken or skipped is reported."""

from __future__ import annotations

import json

import pytest
import torch

from bench import gpu
from bench.gpu_ import decoding as gpu_decoding
from bench.gpu_ import drafters as gpu_drafters
from bench.gpu_ import isolated_tasks
from bench.gpu_ import quantized as gpu_quantized
from bench.gpu_.flash_references import FLASH_REFERENCES
from bench.gpu_.isolated_tasks import Task
from specdec_fast.ops import all_ops
from specdec_fast.ops.registry import INTERPRETING
from support import gpu_tasks
from support.gpu_check import METHODS, TASKS, main, result_of


@pytest.fixture(scope="module", params=[pytest.param(None, id="whole run", marks=pytest.mark.grid)])
def smoke(tmp_path_factory):
    """One whole run: its exit status and its file."""
    if not INTERPRETING or all_ops()["paged_attention"].why_unavailable("cpp"):
        pytest.skip("needs the C++ kernels, and the Triton ones on the CPU")
    return main(tmp_path_factory.mktemp("gpu"))


# What a run reports


def test_every_task_reports(smoke):
    status, content = smoke
    assert status == 0
    assert content["red"] == []
    found = content["parts"]
    assert list(found) == ["environment", *TASKS]
    assert all(task["status"] == "done" and not task["skipped"] for task in found.values())
    assert found["environment"]["torch"] == torch.__version__
    swept = {(row["op"], row["backend"]) for row in found["kernels"]["rows"] if "op" in row}
    served = {(op.name, backend) for op in all_ops().values() for backend in op.implementations}
    assert swept == {(op, backend) for op, backend in served if backend in ("cpp", "triton")}
    assert all(row["checks"] > 0 for row in found["kernels"]["rows"])
    assert found["timings"]["copy_gigabytes_per_second"] > 0


def test_timings_have_times_or_say_why_not(smoke):
    rows = {row["method"]: row for row in smoke[1]["parts"]["timings"]["rows"]}
    assert set(rows) == {"torch", "cpp", "sdpa_dense", *FLASH_REFERENCES}, "interpreted kernels are not timed"
    for method, row in rows.items():
        if method.startswith("varlen"):
            assert "_flash_attention_forward" in row["not_served"]  # a CPU has none
            assert len(row["not_served"]) <= isolated_tasks.LONGEST_MESSAGE
        else:
            assert row["gigabytes_per_second"] == pytest.approx(
                row["bytes_moved"] / row["microseconds"] / 1e3, rel=1e-2
            )
            assert row["call_microseconds"] > 0


def test_quantised_weights_are_checked_and_timed():
    """Also where Triton's interpreter is in the place of a device; nothing is timed in it."""
    result = result_of("quantized")
    assert result["failures"] == []
    rows = {(row["case"], row["method"]): row for row in result["rows"]}
    cases = {f"{kind}_{count}" for kind in ("int4", "int8-a8", "experts_int4") for count in gpu_quantized.SMOKE.rows}
    methods = {name for name in ("cpp", "triton") if all_ops()["quantized_linear"].why_unavailable(name) is None}
    assert set(rows) == {(case, method) for case in cases for method in methods}
    for (_, method), row in rows.items():
        if method == "cpp":
            assert row["share_of_copy"] > 0
            assert row["gigabytes_per_second"] == pytest.approx(
                row["bytes_moved"] / row["microseconds"] / 1e3, rel=1e-2
            )
        else:
            assert row["not_served"] == "an interpreter is not timed"


def test_equivalence_covers_the_schedulers_and_the_noise_floor(smoke):
    rows = smoke[1]["parts"]["equivalence"]["rows"]
    speculative = {(row["method"], row["dtype"]) for row in rows if row["num_draft_tokens"]}
    assert speculative == {(m, d) for m in ("eqspec", "exspec") for d in ("float32", "bfloat16")}
    assert all(row["equal"] == row["outputs"] for row in rows if row["dtype"] == "float32")
    assert [row["dtype"] for row in rows if row["method"] == "transformers"] == ["bfloat16"]


def test_programs_run_with_every_scheduler(smoke):
    found = smoke[1]["parts"]["programs"]
    assert found["backend"] == "cpp", "the programs of a CPU"
    decoded = [row for row in found["rows"] if "method" in row]
    assert [(row["method"], row["dtype"]) for row in decoded] == [
        *((method, "float32") for method in ("plain", *METHODS)),
        *((method, "bfloat16") for method in METHODS),
    ]
    assert all(row["equal"] == row["outputs"] > 0 for row in decoded)


def test_drafters_are_compared_with_plain_decoding(smoke):
    rows = smoke[1]["parts"]["drafters"]["rows"]
    assert [row["what"].split(" at ")[0] for row in rows] == [*gpu_drafters.DRAFTERS] * len(gpu_drafters.TEMPERATURES)
    assert all(row["equal"] == row["outputs"] > 0 for row in rows)


def test_two_ranks_are_compared_with_plain_decoding(smoke):
    found = smoke[1]["parts"]["ranks"]
    assert found["processes"] == 2
    assert all(row["equal"] == row["outputs"] > 0 for row in found["rows"])


def test_layers_on_several_devices_are_compared_with_plain_decoding(smoke):
    found = smoke[1]["parts"]["devices"]
    assert found["devices"] == ["cpu"], "a GPU's test has it beside the CPU"
    assert len(found["rows"]) == 8
    assert all(row["equal"] == row["outputs"] > 0 for row in found["rows"])


def test_decoding_measures_what_was_requested(smoke):
    found, sizes = smoke[1]["parts"]["decoding"], gpu_decoding.SMOKE
    assert found["logit_distance"] <= found["logit_distance_bound"]
    assert found["median_relative_gap"] > 0.1, "ties must be rare"
    names = ("method", "batch", "acceptance", "drafter")
    measured = [gpu_decoding.DecodingSetting(*(row[name] for name in names)) for row in found["rows"]]
    assert measured == list(gpu_decoding.decoding_settings(sizes))
    assert {row["batch"] for row in found["rows"]} == set(sizes.prompts)
    for row in found["rows"]:
        assert row["equal_share"] == 1
        assert row["outputs"] == sizes.prompts[row["batch"]]
        tokens = row["outputs"] * (sizes.new_tokens - 1)
        seconds = row["seconds"] - row["prompt_seconds"]  # each is rounded to a microsecond
        assert seconds == pytest.approx(tokens / row["tokens_per_second"], rel=1e-2, abs=2e-6)
        assert 0 < row["share_outside_forwards"] <= 1
        assert sum(row["host_seconds_by_stage"].values()) <= 1.001 * row["seconds"]  # both are rounded
        assert row["mean_acceptance_length"] > 1 or row["acceptance"] is None
        assert row["speedup_over_plain"] is not None
        assert row["engine_seconds"] > 0
        assert row["warm_up_seconds"] > 0


def test_graphs_are_checked_and_timed(smoke):
    checked, timed = (smoke[1]["parts"][task]["rows"] for task in ("graph_gates", "graphs"))
    assert [row["what"] for row in checked] == [f"{m} in {d}" for d in ("float32", "bfloat16") for m in METHODS]
    assert all(row["equal"] == row["outputs"] > 0 for row in checked)
    assert {(row["what"], row["batch"]) for row in timed} == {
        (what, batch) for what in ("plain step", "verification", "drafting") for batch in gpu_decoding.SMOKE.prompts
    }
    assert all(row["graphs_captured"] == 0 for row in timed), "a CPU has no graphs"
    assert all(row["floor_microseconds"] > 0 for row in timed)


def test_tables_are_printed_last(tmp_path, capsys, only):
    only("timings", "decoding")
    main(tmp_path)
    out = capsys.readouterr().out
    assert "tokens/s" in out
    assert "sdpa_causal" in out
    assert out.splitlines()[-1].endswith("gpu.json: no gate is red")


def test_without_a_gpu_it_says_how_to_try(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path)])
    assert "torch sees no GPU; --device cpu --smoke" in capsys.readouterr().err


# What fails, and what there is no time for


def task(name, run):
    return Task(name, run, 1)


def test_an_exception_ends_its_task_only(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "TASKS", (task("first", gpu_tasks.raises), task("second", gpu_tasks.finishes)))
    status, content = main(tmp_path)
    assert status == 1
    assert content["red"] == ["first"]
    first, second = content["parts"]["first"], content["parts"]["second"]
    assert first["error"] == "RuntimeError: device-side assert"
    assert any("in raises" in line for line in first["traceback"])
    assert any('File "tests/' in line for line in first["traceback"]), "no path of the machine"
    assert first["rows"] == [{"found": "before"}], "what was found before it is kept"
    assert second["rows"] == [{"device": "cpu"}]


def test_tasks_after_the_budget_are_skipped_and_listed(tmp_path, capsys):
    status, content = main(tmp_path, "--budget", "0")
    assert status == 0
    assert {found["status"] for found in content["parts"].values()} == {"skipped"}
    assert list(content["parts"]) == ["environment", *TASKS]
    out = capsys.readouterr().out
    assert "kernels: the budget of 0 s was used up" in out
    assert out.splitlines()[-1].endswith(f"no time for all of environment, {', '.join(TASKS)}")


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"compile"}))
def test_what_a_task_has_no_time_for_is_named(name, monkeypatch):
    result = result_of(name, seconds=0.0)
    assert result["status"] == "done"
    assert result["rows"] == []
    first = {
        "kernels": "append_kv_ on cpp in float32",
        "timings": "paged_attention verify_2x40_page16 bfloat16",
        "quantized": "quantized_linear int4_1 float16",
        "equivalence": "float32",
        "programs": "float32",
        "drafters": "plain at batch 2, temperature 0",
        "ranks": "2 ranks, plain and draft model",
        "devices": "plain at batch 1, temperature 0",
        "graphs": "plain step at batch 2",
        "graph_gates": "eqspec in float32",
        "decoding": "logits of a verification",
        "variants": "rows of linear 2048x48",
    }
    assert result["skipped"][0] == first[name]


def test_gates_run_in_one_round():
    """A second round would halve the time of each."""
    assert sum(not task.measures for task in gpu.TASKS) <= gpu.GATES_AT_ONCE


def test_numbers_that_json_lacks_are_strings(tmp_path):
    record = gpu.Record(tmp_path, {"error": float("nan")})
    record.note(largest=float("inf"))
    content = json.loads(record.path.read_text(), parse_constant=pytest.fail)
    assert (content["error"], content["largest"]) == ("nan", "inf")
