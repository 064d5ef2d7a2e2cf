"""The benchmark of the asynchronous engine runs to its end, and counts what it should."""

from __future__ import annotations

import json

import pytest

from bench import service
from specdec_fast import AsyncEngine

SMALL = ["--pair", "smoke", "--num-prompts", "6", "--max-new-tokens", "10", "--prompt-tokens", "5", "--repeats", "1",
         "--streams", "3", "--batch-size", "2", "--num-draft-tokens", "2", "--seconds", "0.1"]  # fmt: skip


@pytest.mark.grid
def test_service_end_to_end(tmp_path, capsys):
    file = tmp_path / "service.json"
    service.main([*SMALL, "--json", str(file), "--http"])
    found = json.loads(file.read_text())
    for streams in (found, found["http"]):
        assert streams["ratio"] > 0
        assert 0 < streams["first_token_ms"]["p50"] <= streams["first_token_ms"]["p99"]
    for faults in (found["with_cancellations"], found["http_with_cancellations"]):
        assert (faults["num_wrong"], faults["num_hung"]) == (0, 0)
        assert faults["num_ended"] >= 3
    assert found["num_not_ended"] == 0
    assert found["all_pages_free"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found


@pytest.mark.grid
def test_no_speed_of_wrong_tokens(monkeypatch):
    original = AsyncEngine.stream

    def wrong(self, prompt, params):
        return original(self, [*prompt, 1], params)

    monkeypatch.setattr(AsyncEngine, "stream", wrong)
    with pytest.raises(SystemExit, match=r"streams differ from plain decoding"):
        service.main(SMALL)
