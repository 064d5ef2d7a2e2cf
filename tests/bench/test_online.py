"""bench.online serves with updates and without, and holds the outputs against each other."""

from __future__ import annotations

import json

import pytest
import torch

from bench import online
from specdec_fast.assets import demo_pair
from specdec_fast.models.loading import load_model
from specdec_fast.training.online import OnlineUpdates
from support.specblock import write_checkpoint


def test_rows_and_table(tmp_path, capsys):
    target = load_model(str(demo_pair() / "target"), torch.float32, torch.device("cpu"))
    write_checkpoint(tmp_path, target)
    taken = []
    observe = OnlineUpdates.observe

    def recorded(self, outputs):
        taken.append(observe(self, outputs))
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnlineUpdates, "observe", recorded)
        options = ["--calls", "3", "--batch-size", "2", "--max-new-tokens", "8", "--threads", "1"]
        online.main(["--draft", str(tmp_path), *options])
    table, _, result = capsys.readouterr().out.strip().rpartition("\n")
    rows = json.loads(result)["rows"]
    assert [row["call"] for row in rows] == [0, 1, 2]
    assert [row["arm"] for row in rows] == [update.arm for update in taken]
    assert all(row["tokens"] == 16 and row["tokens per step without"] >= 1 for row in rows)
    assert len(table.splitlines()) == 2 + 3


def test_sums_of_parts(capsys):
    row = {"tokens": 10, "seconds without": 2.0, "seconds with": 1.0, "tokens per step without": 2.0,
           "tokens per step with": 3.0, "seconds of update": 1.0}  # fmt: skip
    online.print_table([row | {"call": i, "arm": "full" if i % 2 else "skip"} for i in range(16)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(lines) == 8
    assert lines[0][3:] == ["2.00", "3.00", "1.00", "50%", "0", "1"]
