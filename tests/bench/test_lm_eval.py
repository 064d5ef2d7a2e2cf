"""bench.lm_eval runs, and reports no time of wrong results."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("lm_eval")

from bench import lm_eval

pytestmark = pytest.mark.grid  # `make test-rest` installs the extra
SMALL = ["--repeats", "1", "--threads", "1"]


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch):
    few = {kind: own[:3] for kind, own in lm_eval.requests().items()}
    monkeypatch.setattr(lm_eval, "requests", lambda: few)


def test_times_of_every_kind(capsys):
    lm_eval.main(SMALL)
    table, _, result = capsys.readouterr().out.strip().rpartition("\n")
    kinds = json.loads(result)["kinds"]
    assert set(kinds) == {"loglikelihood", "loglikelihood_rolling", "generate_until"}
    assert all(each["requests"] == 3 and each["faster"] > 0 for each in kinds.values())
    assert "generate_until (3)" in table


def test_wrong_results_are_not_timed(monkeypatch):
    made = lm_eval.models

    def wrong(batch_size):
        lms = made(batch_size)
        lms["specdec_fast"].loglikelihood = lambda own, disable_tqdm: [(-1.0, True)] * len(own)
        return lms

    monkeypatch.setattr(lm_eval, "models", wrong)
    with pytest.raises(SystemExit, match="the results differ from those of hf"):
        lm_eval.main(SMALL)
