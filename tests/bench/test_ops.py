"""The benchmark of the ops: a row for every op and backend, references that do the same work, no speed when wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from bench import ops
from bench.common import correctness_gate as agreement
from bench.common.references import argmax_and_compare, sdpa_dense
from bench.op_cases import OP_CASES
from specdec_fast.ops import all_ops
from specdec_fast.ops.paged_attention import paged_attention
from specdec_fast.ops.verify_chain import verify_chain
from support.grids import grid

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_copy(monkeypatch):
    monkeypatch.setattr(ops, "COPY_BYTES", 1 << 20)


def subject(op, case, dtype=torch.float32):
    case = next(c for c in OP_CASES[op].benchmarks if c.name == case)
    return ops.Subject(all_ops()[op], case, dtype, CPU, ("torch",))


@pytest.mark.grid
def test_last_line_is_the_report(capsys, tmp_path):
    path = tmp_path / "ops.json"
    ops.main(["--cases", "verify", "--ops", "append_kv_,verify_chain", "--repeats", "1", "--json", str(path)])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads(path.read_text())
    timed = {(row["op"], row["dtype"], row["backend"]) for row in report["rows"]}
    for op, references in (("append_kv_", []), ("verify_chain", ["argmax_and_compare"])):
        backends = [b for b in all_ops()[op].implementations if ops.why_not(all_ops()[op], b, CPU) is None]
        assert {b for o, d, b in timed if o == op and d == "bfloat16"} == {*backends, *references}
    for row in report["rows"]:
        assert row["gigabytes_per_second"] == pytest.approx(row["bytes_moved"] / row["milliseconds"] / 1e6, rel=1e-2)
        assert row["share_of_copy"] > 0
        assert row["ratio_to_torch"] > 0
        assert (row["ratio_to_torch"] == 1) or row["backend"] != "torch"
        assert (row["ratio_to_reference"] is None) == (row["op"] == "append_kv_")


def test_rows_replace_the_benchmarks_row_counts():
    args = ops.parse_args(["--ops", "linear", "--cases", "tiny", "--rows", "3,70", "--dtypes", "float32"])
    made = [subject.make() for subject in ops.subjects(args)]
    assert [tuple(one["rows"].shape) for one in made] == [(3, 128), (70, 128)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ops", "linear", "--rows", "8,0"], "--rows: 0; expected 1 or more"),
        (["--ops", "linear,append_kv_", "--rows", "8"], "append_kv_ cannot vary the number of rows"),
    ],
)
def test_rows_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        ops.parse_args(options)
    assert message in capsys.readouterr().err


def forgets_to_write(key_cache, value_cache, key, value, slot_mapping):
    pass


def accepts_one_more(*args, **kwargs):
    target_tokens, num_accepted, next_tokens = verify_chain(*args, **kwargs)
    return target_tokens, num_accepted + 1, next_tokens


def misses_the_first_entries(query, kv, batch, params):
    """Attend without some entries: the first row lacks one of its 251, the last one six of its 256."""
    return paged_attention(query, kv, batch, replace(params, sliding_window=batch.max_seqlen_k - batch.max_seqlen_q))


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("append_kv_", forgets_to_write),
        ("verify_chain", accepts_one_more),
        ("paged_attention", misses_the_first_entries),
    ],
)
def test_no_speed_when_a_result_is_wrong(op, wrong, monkeypatch, capsys):
    if all_ops()[op].why_unavailable("cpp"):
        pytest.skip("needs a backend besides torch")
    monkeypatch.setattr(f"specdec_fast.ops.cpp.{op}", wrong)
    case = "verify_256" if op == "paged_attention" else "verify"
    with pytest.raises(SystemExit, match=rf"{op} {case} float32 on cpp: .*; no speed is reported"):
        ops.main(["--ops", op, "--cases", case, "--backends", "cpp", "--dtypes", "float32", "--repeats", "1"])
    assert "GB/s" not in capsys.readouterr().out


@pytest.mark.parametrize("dtype", grid([torch.float32, torch.float16, torch.bfloat16], keep=[torch.bfloat16]), ids=str)
def test_gate_takes_the_baseline_itself_in_every_dtype(dtype):
    one = subject("paged_attention", "verify_256", dtype)
    assert agreement.disagreement(one.op, "torch", one.make) is None


def test_an_inexact_op_says_how_long_its_sums_are():
    assert set(agreement.LONGEST_SUM) == {op.name for op in all_ops().values() if not op.exact}


def is_in_slice(op, number):
    return number == 0 and op.name != "grouped_linear"  # whose experts are laid out anew, which takes seconds


BENCHMARKS = [
    pytest.param(op, case, id=f"{op.name}-{case.name}", marks=() if is_in_slice(op, number) else pytest.mark.grid)
    for op in all_ops().values()
    for number, case in enumerate(OP_CASES[op.name].benchmarks)
]


def test_every_op_has_benchmarks_with_names_of_their_own():
    for op in OP_CASES.values():
        names = [case.name for case in op.benchmarks]
        assert names
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(("op", "case"), BENCHMARKS)
def test_benchmarks_keep_the_contract(op, case, monkeypatch):
    """Of shapes and types alone: drawing the numbers of whole weights takes seconds, and so does poisoning them."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)

    def zeros(*size, generator, **others):
        return torch.zeros((), **others).expand(*size)

    monkeypatch.setattr(torch, "randn", zeros)
    args = case.make(torch.Generator().manual_seed(0), torch.bfloat16, CPU)
    op.check(**args)
    assert case.why
    assert OP_CASES[op.name].bytes_moved(**args) > 0


# A reference is of use only if it does the same work.
@pytest.mark.parametrize("case", ["verify_256", "decode_1024", "prefill_512"])
def test_dense_reference_attends_to_the_same(case):
    args = subject("paged_attention", case).make()
    rows = sdpa_dense(**args)()  # [B, num_heads, rows, head_dim]
    torch.testing.assert_close(rows.transpose(1, 2).flatten(0, 1), paged_attention(**args))


def test_plain_acceptance_is_the_same():
    args = subject("verify_chain", "verify", torch.bfloat16).make()
    target_tokens, num_accepted, next_tokens = argmax_and_compare(**args)()
    expected = verify_chain(**args)
    assert torch.equal(target_tokens.flatten(), expected[0])
    assert num_accepted.tolist() == expected[1].tolist()
    assert next_tokens.flatten().tolist() == expected[2].tolist()
    assert len(set(num_accepted.tolist())) > 1


@pytest.mark.parametrize("op", ["paged_attention", "verify_chain"])
def test_no_reference_where_it_does_not_apply(op):
    ragged = next(case for case in OP_CASES[op].cases if case.name in ("verify", "ragged"))
    args = ragged.make(torch.Generator().manual_seed(0), torch.float32, CPU)
    assert ops.prepare_reference(op, args) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ops", "sort"], "--ops: sort; expected some of append_kv_"),
        (["--backends", "abacus"], "--backends: abacus; expected some of cpp"),
        (["--backends", "flash", "--ops", "paged_attention"], "--backends: flash cannot run paged_attention here"),
        (["--dtypes", "int7"], "--dtypes: int7; expected some of"),
    ],
)
def test_options_that_cannot_be_served(options, message, capsys):
    with pytest.raises(SystemExit):
        ops.main(options)
    assert message in capsys.readouterr().err


def test_a_filter_that_leaves_nothing_is_an_error():
    with pytest.raises(SystemExit, match="no benchmark of append_kv_ has 'nothing' in its name"):
        ops.main(["--ops", "append_kv_", "--cases", "nothing"])


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "ops.png"
    ops.main(["--ops", "append_kv_", "--cases", "verify", "--repeats", "1", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_fails_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(ops, "measure", lambda *args: pytest.fail("measured first"))
    with pytest.raises(SystemExit, match=r"--plot needs matplotlib; pip install '.\[bench\]'"):
        ops.main(["--plot", "ops.png"])
