"""bench.prefix runs at a small size: rows that are shared, and none."""

from __future__ import annotations

import json

from bench import prefix


def test_tables_and_counts(capsys):
    sizes = ["--pair", "smoke", "--num-prompts", "3", "--shared-tokens", "40"]
    prefix.main([*sizes, "--repeats", "1", "--no-hit-repeats", "1", "--threads", "1"])
    table, _, result = capsys.readouterr().out.strip().rpartition("\n")
    found = json.loads(result)
    assert found["shared"]["cached_tokens"] == 2 * 32
    assert set(found["shared"]["prefill_seconds"]) == {"off", "on", "again"}
    assert 0 < found["no_hit"]["own_share"] < 1
    assert "3 prompts behind 40 common tokens" in table
