"""bench.host_step times steps whose graphs compute nothing, and leaves the library as it was."""

from __future__ import annotations

import json

import pytest
import torch

from bench import host_step
from specdec_fast.program import executors
from specdec_fast.runner.graphs import capture


@pytest.mark.grid
def test_rows_and_table(capsys):
    before = dict(capture.CAPTURES), dict(executors.EXECUTORS)
    host_step.main(["--batch-sizes", "1,3", "--repeats", "1", "--threads", "1"])
    table, _, result = capsys.readouterr().out.strip().rpartition("\n")
    rows = json.loads(result)["rows"]
    assert [(row["batch_size"], row["choice"]) for row in rows] == [
        (1, "greedy"), (1, "sampled"), (3, "greedy"), (3, "sampled"),
    ]  # fmt: skip
    assert all(0 < row["gap_milliseconds"] < row["step_milliseconds"] for row in rows)
    assert len(table.splitlines()) == 2 + 4
    assert before == (capture.CAPTURES, executors.EXECUTORS)


def test_a_gap_ends_with_the_first_launch_of_a_step():
    clock = host_step.Clock()
    captured = clock.record(lambda: (torch.ones(2),))
    captured.replay()
    assert not clock.gaps, "no results were read before"
    clock._read = 1.0
    captured.replay()
    captured.replay()
    assert len(clock.gaps) == 1
