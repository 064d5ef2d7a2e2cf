"""The benchmark of servers starts them, loads them and compares their texts with plain decoding."""

from __future__ import annotations

import json

import pytest

from bench import serving

SMALL = ["--servers", "specdec-fast", "--threads", "1", "--num-prompts", "3", "--max-new-tokens", "8", "--streams", "2",
         "--repeats", "1", "--batch-size", "2", "--num-draft-tokens", "2"]  # fmt: skip


@pytest.mark.grid  # a server in a process of its own
def test_serving_end_to_end(tmp_path, capsys):
    file = tmp_path / "serving.json"
    serving.main([*SMALL, "--json", str(file)])
    (found,) = json.loads(file.read_text())["servers"]
    assert found["share_equal"] == 1.0
    assert found["tokens_per_second"] > 0
    assert 0 < found["first_token_ms"]["p50"] <= found["first_token_ms"]["p99"]
    assert 0 <= found["per_token_ms"]["p50"] <= found["per_token_ms"]["p99"], "0 if all later tokens came at once"
    assert "100.0 %" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setitem(serving.SERVERS, "specdec-fast", "-c raise(SystemExit(3))")
    with pytest.raises(SystemExit, match="ended with status 3"):
        serving.main(SMALL)
