"""``bench.gpu``'s part with two ranks, which runs on a CPU as it is, and where ranks on GPUs are placed."""

from __future__ import annotations

import os
from functools import partial
from itertools import product
from time import monotonic

import pytest
import torch
from torch import distributed

pytest.importorskip("triton")

from bench.gpu_ import ranks as gpu_ranks
from bench.gpu_.isolated_tasks import Progress
from specdec_fast import DecodingStats
from specdec_fast.ranks import exchange, workers
from support.gpu_check import result_of


def test_two_ranks_emit_what_plain_decoding_at_batch_1_does(monkeypatch):
    """As on a GPU: a process group exchanges the numbers, and PyTorch runs the forwards."""
    pytest.importorskip("accelerate")  # transformers needs it for plans
    monkeypatch.setattr(exchange, "_has_extension", lambda: False)  # in rank 0, and so no rank shares memory
    result = result_of("ranks")
    assert result["failures"] == []
    assert (result["processes"], result["kv_heads_of_a_rank"]) == (2, 1)
    assert (result["exchange"], result["process_group"]) == ("GroupRanks", "cpu:gloo,cuda:gloo")
    assert "share no memory" in result["why_no_program"]
    cases = product(("0", "1"), ("plain", "draft model"), ("1", "4"))
    assert [row["what"] for row in result["rows"]] == [f"{n} at batch {b}, temperature {t}" for t, n, b in cases]
    for row in result["rows"]:
        assert row["equal"] == row["outputs"] == gpu_ranks.SMOKE.num_prompts
        assert row["tokens_per_second"] > 0


def compared(first, second):
    """Return the failures for outputs of plain decoding at batch 1, and at batch 4; None: decoding raises."""
    progress, found = Progress(monotonic() + 600, lambda result: None), {}

    def decoded(tokens):
        if tokens is None:
            raise RuntimeError("a rank has ended")
        return tokens, 1.0, DecodingStats(), {}

    for batch_size, tokens in ((1, first), (4, second)):
        case = gpu_ranks.Case("plain", batch_size, 0.0)
        progress.attempt(str(case), partial(gpu_ranks.compare, partial(decoded, tokens), case, found, progress))
    return {failure["what"]: failure["why"] for failure in progress.result["failures"]}


def test_other_outputs_are_red():
    assert compared([[1], [2]], [[1], [2]]) == {}
    why = "1 of 2 outputs differ from plain decoding at batch 1"
    assert compared([[1], [2]], [[1], [3]]) == {"plain at batch 4, temperature 0": why}
    first, second = compared(None, [[1], [2]]).values()
    assert first == "RuntimeError: a rank has ended"
    assert "no outputs of plain decoding at batch 1" in second


def test_ranks_on_one_gpu_do_not_meet_nccl(monkeypatch, tmp_path):
    """Nor in the group that older PyTorch makes for a mesh of GPUs if the ranks' own one is named "gloo"."""
    joined, devices = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(distributed, "init_process_group", lambda backend, **_: joined.append(backend))
    monkeypatch.setattr(distributed.distributed_c10d, "_set_pg_timeout", lambda timeout: None)
    for on_one_gpu in (False, True):
        workers.join_group(1, 2, str(tmp_path), on_one_gpu)
    assert devices == [1, 0]
    assert joined == ["nccl", "cpu:gloo,cuda:gloo"]


@pytest.mark.parametrize(("on_one_gpu", "expected"), [(False, ["1", "2"]), (True, ["0", "0"])])
def test_the_gpus_that_transformers_takes_in_other_ranks(monkeypatch, on_one_gpu, expected):
    """It reads the number of the GPU from the environment."""
    started = []

    class Process:
        def __init__(self, command, env, **_):
            started.append(env["LOCAL_RANK"])

        def wait(self, timeout=None):
            return 0

    monkeypatch.setattr(workers.subprocess, "Popen", Process)
    workers.Workers(3, "nothing", on_one_gpu).close()
    assert started == expected


@pytest.mark.parametrize("before", [None, "3"])
def test_the_gpu_that_transformers_takes_in_rank_0(monkeypatch, before):
    """Transformers 5.17 fails without the variable; what has started the engine's process may have set it."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if before is not None:
        monkeypatch.setenv("LOCAL_RANK", before)
    with workers.first_gpu():
        assert os.environ["LOCAL_RANK"] == "0"
    assert os.environ.get("LOCAL_RANK") == before
