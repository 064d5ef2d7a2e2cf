"""The soak test runs to its end in a short form, and notices what it should."""

from __future__ import annotations

import json

import pytest

from bench import soak
from bench.soak_ import clients
from bench.soak_.clients import Clients, Found

SMALL = ["--pair", "smoke", "--num-prompts", "6", "--max-new-tokens", "24", "--prompt-tokens", "12", "--clients", "8",
         "--batch-size", "3", "--engines", "model-exspec,ngram-eqspec", "--fault-probability", "0.02"]  # fmt: skip


@pytest.mark.grid
def test_soak_end_to_end(tmp_path, capsys):
    file = tmp_path / "soak.json"
    soak.main([*SMALL, "--seconds", "3", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["problems"] == []
    assert [row["engine"] for row in found["rows"]] == ["model-exspec", "ngram-eqspec"]
    assert all(sum(row["ends"].values()) >= 8 for row in found["rows"]), "a client sends one request at least"
    assert all({"preemptions", "repeated steps"} <= set(row) for row in found["rows"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found


@pytest.mark.grid
def test_a_wrong_token_is_noticed(monkeypatch, capsys):
    original = Clients._check

    def wrong(self, request, result, reason, error):
        tokens, *rest = result
        original(self, request, ([*tokens[:-1], -1] if tokens else tokens, *rest), reason, error)

    monkeypatch.setattr(Clients, "_check", wrong)
    with pytest.raises(SystemExit, match=r"model-exspec: wrong output: SamplingParams\("):
        soak.main([*SMALL, "--seconds", "0.5"])


def test_a_lost_page_is_noticed(monkeypatch):
    original = clients.Faults.count

    def losing(self):
        original(self)
        self._core.pool.forget_prefixes()  # most pages are kept
        self._core.pool._free.pop()

    monkeypatch.setattr(clients.Faults, "_counted", lambda self: self._step())  # which counts in the middle
    monkeypatch.setattr(clients.Faults, "count", losing)
    with pytest.raises(SystemExit, match="model-exspec: left over: pages: "):
        soak.main([*SMALL, "--seconds", "0.5"])


@pytest.mark.parametrize("jumps", [0, 5])
def test_memory_that_grows_with_requests_is_noticed(jumps):
    """Whatever comes once, or comes and goes, is no leak."""
    flat = [(i, 10**8 + (i * 7919) % 1000 + (2 * 10**7 if i in range(120, 120 + jumps) else 0)) for i in range(200)]
    leaking = [(i, size + i * 10**5) for i, size in flat]
    assert soak.faults_of(Found(memory=flat), judges_memory=True) == []
    assert soak.faults_of(Found(memory=leaking), judges_memory=False) == []
    (fault,) = soak.faults_of(Found(memory=leaking), judges_memory=True)
    assert fault.startswith("memory grew by ")
    assert soak.faults_of(Found(memory=[(3, 10), (3, 20)]), judges_memory=True) == []
