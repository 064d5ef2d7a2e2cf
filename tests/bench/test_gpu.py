"""``bench.gpu`` at tiny sizes on the CPU: every task measures, and what is wrong, broken or skipped is reported."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from time import monotonic

import pytest
import torch

from bench import gpu
from bench.common import device as bench_device
from bench.gpu_ import decoding as gpu_decoding
from bench.gpu_ import equivalence as gpu_equivalence
from bench.gpu_ import isolated_tasks
from bench.gpu_ import kernels as gpu_kernels
from bench.gpu_ import timings as gpu_timings
from bench.gpu_.flash_references import FLASH_REFERENCES
from bench.gpu_.isolated_tasks import Settings, Task, inline
from specdec_fast import Engine
from specdec_fast.cuda_graphs.capture import Captured
from specdec_fast.errors import BackendError
from specdec_fast.ops import all_ops
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.oracle.ops.paged_attention import paged_attention
from specdec_fast.oracle.ops.verify_chain import verify_chain
from support import gpu_tasks, repeated

CPU, SMOKE = torch.device("cpu"), Settings("cpu", smoke=True)
METHODS = ("eqspec", "exspec")
TASKS = {task.name: task for task in gpu.TASKS}


def result_of(name, settings=SMOKE, seconds=600.0):
    return inline(TASKS[name], settings, monotonic() + seconds, lambda found: None)


def main(tmp_path, *options):
    status = gpu.main(["--out", str(tmp_path), "--device", "cpu", "--smoke", *options])
    return status, json.loads((tmp_path / "gpu.json").read_text())


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One whole run: its exit status and its file."""
    if not INTERPRETING or all_ops()["paged_attention"].why_unavailable("cpp"):
        pytest.skip("needs the C++ kernels, and the Triton ones on the CPU")
    return main(tmp_path_factory.mktemp("gpu"))


@pytest.fixture
def only(monkeypatch):
    """Return a function that leaves only the named tasks."""
    return lambda *names: monkeypatch.setattr(gpu, "TASKS", tuple(TASKS[name] for name in names))


@pytest.fixture
def on_cpp(monkeypatch):
    """Return a function that leaves only the kernels in C++, and replaces one of them."""
    if all_ops()["paged_attention"].why_unavailable("cpp"):
        pytest.skip("needs a backend besides torch")

    def cpp_alone(op, device):
        return ["cpp"] if "cpp" in op.implementations else []

    def exchange(op, function):
        monkeypatch.setattr(gpu_kernels, "serving", cpp_alone)
        monkeypatch.setattr(gpu_kernels, "backends_on", cpp_alone)
        monkeypatch.setattr(gpu_timings, "serving", cpp_alone)
        monkeypatch.setattr(f"specdec_fast.ops.cpp.{op}", function)

    return exchange


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


def test_equivalence_covers_the_schedulers_and_the_noise_floor(smoke):
    rows = smoke[1]["parts"]["equivalence"]["rows"]
    speculative = {(row["method"], row["dtype"]) for row in rows if row["num_draft_tokens"]}
    assert speculative == {(m, d) for m in ("eqspec", "exspec") for d in ("float32", "bfloat16")}
    assert all(row["equal"] == row["outputs"] for row in rows if row["dtype"] == "float32")
    assert [row["dtype"] for row in rows if row["method"] == "transformers"] == ["bfloat16"]


def test_programs_run_with_every_scheduler(smoke):
    found = smoke[1]["parts"]["programs"]
    assert found["backend"] == "cpp", "the programs of a CPU"
    assert [(row["method"], row["dtype"]) for row in found["rows"]] == [
        *((method, "float32") for method in ("plain", *METHODS)),
        *((method, "bfloat16") for method in METHODS),
    ]
    assert all(row["equal"] == row["outputs"] > 0 for row in found["rows"])


def test_decoding_measures_what_was_requested(smoke):
    found, sizes = smoke[1]["parts"]["decoding"], gpu_decoding.SMOKE
    assert found["logit_distance"] <= found["logit_distance_bound"]
    assert found["median_relative_gap"] > 0.1, "ties must be rare"
    names = ("method", "batch", "acceptance")
    measured = [gpu_decoding.DecodingSetting(*(row[name] for name in names)) for row in found["rows"]]
    assert measured == list(gpu_decoding.decoding_settings(sizes))
    assert {row["batch"] for row in found["rows"]} == set(sizes.prompts)
    for row in found["rows"]:
        assert row["equal_share"] == 1
        assert row["outputs"] == sizes.prompts[row["batch"]]
        assert row["seconds"] == pytest.approx(row["outputs"] * sizes.new_tokens / row["tokens_per_second"], rel=1e-2)
        assert 0 < row["share_outside_forwards"] <= 1
        assert sum(row["host_seconds_by_stage"].values()) <= 1.001 * row["seconds"]  # both are rounded
        assert row["mean_acceptance_length"] > 1 or row["acceptance"] is None
        assert row["speedup_over_plain"] > 0
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


def cannot(self, run):
    raise RuntimeError("operation not permitted when stream is capturing")


def test_graphs_that_change_tokens_or_are_missing_are_red(monkeypatch):
    """First repeated calls replace graphs, as on a GPU; then their result is not the call's."""
    repeated.graphs_for_cpu(monkeypatch)
    gates, times = result_of("graph_gates"), result_of("graphs")
    assert not gates["failures"]
    assert not times["failures"]
    assert all(row["target_graphs"] and row["draft_graphs"] for row in gates["rows"])
    assert all(row["graphs_captured"] for row in times["rows"])
    monkeypatch.setattr(repeated.Repeated, "__call__", lambda self, run: Captured(lambda: None, run()))
    assert any("outputs differ with graphs" in failure["why"] for failure in result_of("graph_gates")["failures"])
    monkeypatch.setattr(repeated.Repeated, "__call__", cannot)
    whys = {failure["why"] for failure in result_of("graph_gates")["failures"]}
    assert any(why.startswith("the target has no graphs") for why in whys)


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


# What is wrong turns red


def window_too_short(query, kv, batch, params):
    return paged_attention(query, kv, batch, replace(params, sliding_window=max(1, batch.max_seqlen_k - 4)))


def test_a_wrong_kernel_is_red_and_has_no_speed(tmp_path, only, on_cpp, capsys):
    only("kernels", "timings")
    on_cpp("paged_attention", window_too_short)
    status, content = main(tmp_path)
    assert status == 1
    assert content["red"] == ["kernels", "timings"]
    failures = content["parts"]["kernels"]["failures"]
    assert {"paged_attention prefill on cpp in float32, seed 0"} <= {failure["what"] for failure in failures}
    first = failures[0]
    assert first["error"] > 2 * first["baseline"] + first["eps"] * first["largest"]
    row = next(row for row in content["parts"]["timings"]["rows"] if row["method"] == "cpp")
    assert "microseconds" not in row
    assert "its largest error is" in row["wrong"]
    assert "paged_attention prefill on cpp" in capsys.readouterr().out


def leaves_the_last_row(query, **others):
    out = torch.empty_like(query)
    out[:-1] = paged_attention(query, **others)[:-1]
    return out


def scaled_by_the_batch(query, **others):
    return paged_attention(query, **others) * (1 + 1e-6 * len(query))  # right within rounding


def product_scaled_by_the_batch(rows, weight, bias=None):
    return torch.nn.functional.linear(rows, weight, bias) * (1 + 1e-6 * len(rows))


def accepts_one_more(*args, **kwargs):
    target_tokens, num_accepted, next_tokens = verify_chain(*args, **kwargs)
    return target_tokens, num_accepted + 1, next_tokens


def not_implemented(**args):
    raise NotImplementedError("soon")


@pytest.mark.parametrize(
    ("op", "function", "what", "why"),
    [
        ("paged_attention", leaves_the_last_row, "paged_attention prefill on cpp", "error is nan"),
        ("paged_attention", scaled_by_the_batch, "parts of prefill on cpp", "calls have other bits"),
        ("paged_attention", scaled_by_the_batch, "in_larger_batch of verify on cpp", "2 of 2 calls have other bits"),
        ("linear", product_scaled_by_the_batch, "rows of linear on cpp", "calls have other bits"),
        ("verify_chain", accepts_one_more, "verify_chain ragged on cpp", "results differ from those of the oracle"),
        ("append_kv_", lambda **args: None, "append_kv_ verify on cpp", "arguments, changed in place, differ"),
        ("verify_chain", not_implemented, "verify_chain ragged on cpp", "NotImplementedError: soon"),
    ],
)
def test_kernel_gates_reject(op, function, what, why, on_cpp):
    on_cpp(op, function)
    failures = result_of("kernels")["failures"]
    assert any(failure["what"].startswith(what) and why in failure["why"] for failure in failures), failures


def test_matrices_of_one_launch_must_have_the_bits_of_a_launch_for_each(monkeypatch):
    if not INTERPRETING:
        pytest.skip("needs the Triton kernels on the CPU")
    triton_linear = importlib.import_module("specdec_fast.triton_kernels.linear")
    linears = triton_linear.linears
    what = "linears on triton in float32"
    assert [row["wrong"] for row in result_of("kernels")["rows"] if row.get("check") == what] == [0]
    spoil = lambda rows, weights, *rest: [x * (1 + 1e-6 * (len(weights) > 1)) for x in linears(rows, weights, *rest)]  # noqa: E731
    monkeypatch.setattr(triton_linear, "linears", spoil)
    failures = {failure["what"]: failure["why"] for failure in result_of("kernels")["failures"]}
    assert failures == {what: "5 of 5 calls have other bits than a launch for each matrix"}


def test_a_limit_that_a_backend_reports_is_no_failure(on_cpp):
    def limited(**args):
        raise BackendError("no heads of that size")

    on_cpp("verify_chain", limited)
    result = result_of("kernels")
    row = next(row for row in result["rows"] if row.get("op") == "verify_chain")
    assert set(row["not_served"].values()) == {"no heads of that size"}
    assert not result["failures"]


def test_a_backend_that_is_missing_is_red(monkeypatch):
    """Otherwise a GPU without Triton would be green with nothing checked."""
    for name in set(gpu_kernels.BACKENDS) - {"torch"}:
        gone = replace(gpu_kernels.BACKENDS[name], why_unavailable=lambda: "gone", device_types=("cpu",))
        monkeypatch.setitem(gpu_kernels.BACKENDS, name, gone)
    failures = result_of("kernels")["failures"]
    in_triton = {f"{name} on triton" for name, op in all_ops().items() if "triton" in op.implementations}
    assert {failure["what"] for failure in failures} >= in_triton
    assert not any("flash" in failure["what"] for failure in failures), "flash implements some ops only"


def test_another_token_is_red_unless_the_best_logits_are_near(monkeypatch):
    generate = Engine.generate

    def wrong(self, *args, **kwargs):
        outputs = generate(self, *args, **kwargs)
        outputs[1].token_ids[2] += 1
        return outputs

    monkeypatch.setattr(Engine, "generate", wrong)
    result = result_of("equivalence")
    methods = [failure["what"].split(" at batch 2")[0] for failure in result["failures"]]
    assert methods == ["plain", "eqspec", "exspec"]
    (where,) = result["failures"][0]["divergences"]
    assert (where["prompt"], where["position"]) == (1, 2)
    assert where["relative_gap"] > gpu_equivalence.FP32_NOISE
    monkeypatch.setattr(gpu_equivalence, "FP32_NOISE", 2.0)
    assert not result_of("equivalence")["failures"]


def test_programs_that_change_tokens_or_are_missing_are_red(monkeypatch):
    if all_ops()["linear"].why_unavailable("cpp"):
        pytest.skip("a CPU has programs in C++ only")
    generate, made = Engine.generate, []

    def wrong(self, *args, **kwargs):
        outputs = generate(self, *args, **kwargs)
        made.append(self)
        outputs[1].token_ids[2] += len(made)  # another token in every run
        return outputs

    monkeypatch.setattr(Engine, "generate", wrong)
    methods = [failure["what"].split(" at batch 2")[0] for failure in result_of("programs")["failures"]]
    assert methods == ["plain", *METHODS, *METHODS]
    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr("specdec_fast.models.ragged_model.executor_for", lambda *_: (None, "no program here"))
    whys = {failure["why"] for failure in result_of("programs")["failures"]}
    assert whys == {"RuntimeError: the target has no program: no program here"}


def test_an_exception_ends_its_check_only(monkeypatch):
    """The GPU may not be there again, so the checks after it still run."""
    ragged = gpu_decoding.ragged_logits

    def raises(*args):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gpu_decoding, "ragged_logits", raises)
    result = result_of("decoding")
    assert [failure["why"] for failure in result["failures"]] == ["RuntimeError: no kernel image"]
    assert any("in raises" in line for line in result["failures"][0]["traceback"])
    assert len(result["rows"]) == len(list(gpu_decoding.decoding_settings(gpu_decoding.SMOKE)))
    monkeypatch.setattr(gpu_decoding, "ragged_logits", ragged)
    generate = Engine.generate
    calls = []

    def fails_once(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 5:  # the transcripts, three runs of plain decoding, and then
            raise RuntimeError("illegal memory access")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "generate", fails_once)
    result = result_of("decoding")
    assert [failure["what"] for failure in result["failures"]] == ["eqspec at batch 2, acceptance 0.8"]
    assert len(result["rows"]) == len(list(gpu_decoding.decoding_settings(gpu_decoding.SMOKE))) - 1


def test_outputs_that_differ_from_plain_decoding_are_red(monkeypatch):
    decode = gpu_decoding.Run.decode

    def other(self, new_tokens):
        outputs = decode(self, new_tokens)
        return outputs if len(self.models) == 1 else [[token + 1 for token in outputs[0]], *outputs[1:]]

    monkeypatch.setattr(gpu_decoding.Run, "decode", other)
    result = result_of("decoding")
    drafted = [row for row in result["rows"] if row["acceptance"] is not None]
    assert len(result["failures"]) == len(drafted) > 0
    assert all("of the outputs are those of plain decoding" in failure["why"] for failure in result["failures"])


def test_time_for_engines_and_recording_counts(monkeypatch):
    """Measuring takes a fraction of the time that making engines and recording graphs takes."""
    clock = [0.0]
    engine = gpu_decoding.Bench.engine

    def slow(self, setting):
        clock[0] += 100
        return engine(self, setting)

    monkeypatch.setattr(gpu_decoding.Bench, "engine", slow)
    monkeypatch.setattr(gpu_decoding, "monotonic", lambda: clock[0])
    monkeypatch.setattr(isolated_tasks, "monotonic", lambda: clock[0])
    result = inline(TASKS["decoding"], SMOKE, 450.0, lambda found: None)
    assert len(result["rows"]) == 2, "a third one would end after the deadline"
    assert result["skipped"][0] == "plain at batch 1"


def test_ops_are_timed_as_graphs_where_there_are_any(monkeypatch, only):
    """A call that cannot be recorded is timed as it is."""
    monkeypatch.setattr(bench_device, "captures", lambda: {"cpu": repeated.Repeated})
    rows = [row for row in result_of("timings")["rows"] if "microseconds" in row]
    assert rows
    assert all(row["as_graph"] for row in rows)
    monkeypatch.setattr(repeated.Repeated, "__call__", cannot)
    rows = [row for row in result_of("timings")["rows"] if "microseconds" in row]
    assert rows
    assert not any(row["as_graph"] for row in rows)


def test_tasks_can_be_chosen(tmp_path, capsys):
    _, content = main(tmp_path, "--parts", "timings,equivalence")
    assert list(content["parts"]) == ["environment", "timings", "equivalence"]
    assert "timings: done after" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(tmp_path, "--parts", "timing")
    assert "unknown part timing; there are compile, graphs, decoding" in capsys.readouterr().err


def test_wrong_logits_of_a_verification_are_red(monkeypatch):
    ragged = gpu_decoding.ragged_logits
    monkeypatch.setattr(gpu_decoding, "ragged_logits", lambda *args: 1.01 * ragged(*args))
    assert [failure["what"] for failure in result_of("decoding")["failures"]] == ["logits of a verification"]


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
        "timings": "paged_attention verify_2x40 bfloat16",
        "equivalence": "float32",
        "programs": "float32",
        "graphs": "plain step at batch 2",
        "graph_gates": "eqspec in float32",
        "decoding": "logits of a verification",
    }
    assert result["skipped"][0] == first[name]


def test_numbers_that_json_lacks_are_strings(tmp_path):
    record = gpu.Record(tmp_path, {"error": float("nan")})
    record.note(largest=float("inf"))
    content = json.loads(record.path.read_text(), parse_constant=pytest.fail)
    assert (content["error"], content["largest"]) == ("nan", "inf")
