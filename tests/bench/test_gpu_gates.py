"""The gates of ``bench.gpu`` at tiny sizes on the CPU: what is wrong turns red."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from bench.common import device as bench_device
from bench.common.replay import ReplayDrafter
from bench.gpu_ import decoding as gpu_decoding
from bench.gpu_ import drafters as gpu_drafters
from bench.gpu_ import equivalence as gpu_equivalence
from bench.gpu_ import isolated_tasks
from bench.gpu_ import kernels as gpu_kernels
from bench.gpu_ import quantized as gpu_quantized
from bench.gpu_ import timings as gpu_timings
from bench.gpu_.isolated_tasks import inline
from specdec_fast import Engine
from specdec_fast.errors import BackendError
from specdec_fast.ops import all_ops
from specdec_fast.ops.grouped_quantized_linear import grouped_quantized_linear
from specdec_fast.ops.paged_attention import paged_attention
from specdec_fast.ops.quantized_linear import quantized_linear
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.ops.verify_chain import verify_chain
from specdec_fast.runner.graphs.capture import Captured
from specdec_fast.runner.graphs.drafts import DraftGraphs
from support import repeated
from support.gpu_check import METHODS, SMOKE, TASKS, main, result_of

CPU = torch.device("cpu")


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
        monkeypatch.setattr(gpu_quantized, "serving", cpp_alone)
        monkeypatch.setattr(f"specdec_fast.ops.cpp.{op}", function)

    return exchange


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


def packed_scaled_by_the_batch(rows, weight, bias=None):
    return quantized_linear(rows, weight, bias) * (1 + len(rows) / 1024)  # right within rounding


def packed_doubled(rows, weight, bias=None):
    return 2 * quantized_linear(rows, weight, bias)


def experts_nearly_right(rows, expert_ids, weight, bias=None):
    return grouped_quantized_linear(rows, expert_ids, weight, bias) * (1 + 1 / 1024)


def accepts_one_more(*args, **kwargs):
    target_tokens, num_accepted, next_tokens = verify_chain(*args, **kwargs)
    return target_tokens, num_accepted + 1, next_tokens


def not_implemented(**args):
    raise NotImplementedError("soon")


@pytest.mark.parametrize(
    ("op", "function", "what", "why"),
    [
        ("paged_attention", leaves_the_last_row, "paged_attention prefill on cpp", "error is nan"),
        pytest.param(
            "paged_attention",
            scaled_by_the_batch,
            "parts of prefill on cpp",
            "calls have other bits",
            marks=pytest.mark.grid,
        ),
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


@pytest.mark.grid
def test_matrices_of_one_launch_must_have_the_bits_of_a_launch_for_each(monkeypatch):
    if not INTERPRETING:
        pytest.skip("needs the Triton kernels on the CPU")
    for name in ("serving", "backends_on"):
        monkeypatch.setattr(gpu_kernels, name, lambda op, device: ["triton"] if op.name == "linear" else [])
    triton_linear = importlib.import_module("specdec_fast.triton_kernels.linear")
    linears = triton_linear.linears
    what = "linears on triton in float32"
    assert [row["wrong"] for row in result_of("kernels")["rows"] if row.get("check") == what] == [0]
    spoil = lambda rows, weights, *rest: [x * (1 + 1e-6 * (len(weights) > 1)) for x in linears(rows, weights, *rest)]  # noqa: E731
    monkeypatch.setattr(triton_linear, "linears", spoil)
    failures = {failure["what"]: failure["why"] for failure in result_of("kernels")["failures"]}
    assert failures == {what: "5 of 5 calls have other bits than a launch for each matrix"}


@pytest.mark.parametrize(
    ("op", "function", "what", "why"),
    [
        ("quantized_linear", packed_scaled_by_the_batch, "int4_3", "the first row has other bits alone"),
        ("quantized_linear", packed_doubled, "int8-a8_1", "its largest error is"),
        (
            "grouped_quantized_linear",
            experts_nearly_right,
            "experts_int4_1",
            "other bits than those of quantized_linear",
        ),
    ],
)
def test_gates_of_quantised_weights_reject(op, function, what, why, on_cpp):
    on_cpp(op, function)
    result = result_of("quantized")
    reasons = {failure["what"]: failure["why"] for failure in result["failures"]}
    name = f"{op} {what} float16 on cpp"
    assert why in reasons[name]
    assert reasons[name].endswith("it is not timed")
    timed = {(row["op"], row["case"]) for row in result["rows"] if "microseconds" in row}
    assert (op, what) not in timed


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


def cannot(self, run):
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.grid
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


@pytest.mark.grid
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


@pytest.mark.grid
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
    monkeypatch.setattr("specdec_fast.runner.ragged_model.executor_for", lambda *_: (None, "no program here"))
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
        if len(calls) == 6:  # the transcripts, four runs of plain decoding, and then
            raise RuntimeError("illegal memory access")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "generate", fails_once)
    result = result_of("decoding")
    assert [failure["what"] for failure in result["failures"]] == ["eqspec at batch 2, eagle3, acceptance 0.8"]
    assert len(result["rows"]) == len(list(gpu_decoding.decoding_settings(gpu_decoding.SMOKE))) - 1


def test_outputs_that_differ_from_plain_decoding_are_red(monkeypatch):
    decode = gpu_decoding.Run.decode

    def other(self, new_tokens):
        outputs = decode(self, new_tokens)
        drafts = isinstance(self.engine.drafter, ReplayDrafter)
        return [[token + 1 for token in outputs[0]], *outputs[1:]] if drafts else outputs

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
    assert result["skipped"][0] == "eqspec at batch 2, draft model, acceptance 0.8"


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


@pytest.mark.grid
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


@pytest.mark.parametrize("name", ["mtp chain", "eagle3 tree"])
def test_what_graphs_can_draft_must_be_drafted_by_them(monkeypatch, name):
    """Where the target has graphs, as on a GPU."""
    repeated.graphs_for_cpu(monkeypatch)
    monkeypatch.setattr(gpu_drafters, "TEMPERATURES", (1.0,))
    monkeypatch.setattr(gpu_drafters, "SMOKE", replace(gpu_drafters.SMOKE, max_new_tokens=24))
    few = {each: gpu_drafters.DRAFTERS[each] for each in (gpu_drafters.PLAIN, name)}
    monkeypatch.setattr(gpu_drafters, "DRAFTERS", few)
    found = result_of("drafters")
    assert found["failures"] == []
    _, drafted = found["rows"]
    assert drafted["equal"] == drafted["outputs"] > 0
    assert drafted["draft_graphs"] > 0
    monkeypatch.setattr(DraftGraphs, "has_loop", lambda *_: False)
    (failure,) = result_of("drafters")["failures"]
    assert failure["what"] == f"{name} at batch 2, temperature 1"
    assert failure["why"].startswith("no graph drafted")
