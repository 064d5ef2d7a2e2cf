"""bench.chats runs at a small size: the arms, their budgets, and what each finds."""

from __future__ import annotations

import json

import pytest

from bench import chats
from bench.common.peak_memory import RESET, PeakMemory


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Options for three chats of two turns; the peaks are not those of new processes, which take seconds."""
    monkeypatch.setattr(chats, "in_subprocess", lambda *_: chats.Peak(30_000_000, 20_000_000))
    path = tmp_path / "question.jsonl"
    lines = [{"turns": ["One day a dog", "What then?"]}, {"turns": ["Only one"]}, {"turns": ["Count to five", "Again"]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--prompts", str(path), "--num-chats", "2", "--max-new-tokens", "20", "--repeats", "1", "--parts", "4"]


def test_tables_and_counts(arguments, capsys):
    chats.main(arguments)
    table, _, result = capsys.readouterr().out.strip().rpartition("\n")
    found = json.loads(result)
    for name in ("plain", "speculation"):
        rows = {row["arm"]: row for row in found[name]}
        assert list(rows) == ["no cache", "cache", "1/4", "least"]
        assert rows["no cache"]["cached_share"] == 0 < rows["cache"]["cached_share"]
        assert rows["1/4"]["memory_bytes"] == 5_000_000
        assert rows["least"]["max_batch_size"] == 1
        for row in (rows["1/4"], rows["least"]):
            assert row["kv_bytes"] < row["planned_bytes"] <= row["memory_bytes"]
        assert [row["drafts"] for row in found[name]][:2] == [name == "speculation"] * 2
    assert "2 chats of 2 turns" in table


def test_other_answers_end_the_run(arguments, monkeypatch):
    hold = chats.hold

    def wrong(engine, *rest):
        held = hold(engine, *rest)
        if engine.config.prefix_cache:
            held.answers[1][0] = [1]
        return held

    monkeypatch.setattr(chats, "hold", wrong)
    with pytest.raises(SystemExit, match="answers of cache, 1/4, least differ"):
        chats.main(arguments)


def test_too_few_chats_end_the_run(arguments):
    with pytest.raises(SystemExit, match="only 2 chats of 2 turns fit into 512 positions"):
        chats.main([*arguments, "--num-chats", "3"])


@pytest.mark.skipif(not RESET.exists(), reason="the peak is read from Linux's /proc")
def test_the_peak_is_that_of_what_was_freed():
    peak = PeakMemory()
    size = 1 << 26
    block = b"x" * size
    del block
    assert 0.9 * size < peak.bytes() < 2 * size
    peak.restart()
    assert peak.bytes() < 0.9 * size, "what was freed before counts no more"
