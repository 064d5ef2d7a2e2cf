"""bench.custom_generate runs at a small size, and reports no time of wrong tokens."""

from __future__ import annotations

import json

import pytest

from bench import custom_generate

SMALL = ["--batch-sizes", "16", "--max-new-tokens", "2", "--repeats", "1", "--threads", "1"]


@pytest.mark.grid
def test_times_of_every_call(capsys):
    custom_generate.main(SMALL)
    table, _, result = capsys.readouterr().out.strip().rpartition("\n")
    found = json.loads(result)["batches"]["16"]
    assert set(found["seconds"]) == {"generate", *(f"custom_generate, {n}" for n in ("draft model", "ngram", "none"))}
    assert found["times_faster"]["generate"] == 1
    assert "custom_generate, draft model" in table


def test_wrong_tokens_are_not_timed(monkeypatch):
    def wrong(model, input_ids, draft=None, num_draft_tokens=None, **kwargs):
        return input_ids

    monkeypatch.setattr(custom_generate, "custom_generate", wrong)
    with pytest.raises(SystemExit, match="tokens differ from those of generate"):
        custom_generate.main(SMALL)
