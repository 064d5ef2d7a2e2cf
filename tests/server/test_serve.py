"""The command within this process: what it refuses and reports at its start, and what holds while it serves."""

from __future__ import annotations

import gc
import re
import signal
import socket

import pytest
import uvicorn

from specdec_fast.assets import demo_pair
from specdec_fast.cli import main
from specdec_fast.commands import serve

NOT_COLLECTED = serve._not_collected


def test_the_address_is_printed_when_it_can_be_connected_to(monkeypatch, capsys):
    """uvicorn takes a second to start, longer on a busy machine; a script that reads the line connects at once."""
    printed = []

    async def serve_nothing(self, sockets):
        printed.append(capsys.readouterr().out)
        port = int(re.search(r"http://127.0.0.1:(\d+)/v1", printed[0])[1])
        socket.create_connection(("127.0.0.1", port)).close()

    monkeypatch.setattr(uvicorn.Server, "serve", serve_nothing)
    assert main(["serve", "--target", str(demo_pair() / "target"), "--draft", "none", "--port", "0"]) == 0
    assert printed


def test_the_garbage_collector_passes_over_the_models_while_they_are_served(monkeypatch):
    monkeypatch.setattr(serve, "_not_collected", NOT_COLLECTED)
    counts = [gc.get_freeze_count()]

    async def served(app, engine, listener, args):
        counts.append(gc.get_freeze_count())
        await engine.close()

    monkeypatch.setattr(serve, "_serve", served)
    assert main(["serve", "--target", str(demo_pair() / "target"), "--draft", "none", "--port", "0"]) == 0
    before, during, after = *counts, gc.get_freeze_count()
    assert during > before, "a full collection looks at every object of torch and the models"
    gc.freeze()  # as it was before
    assert after <= before


@pytest.mark.parametrize("has_template", [False, True])
def test_a_model_that_cannot_be_sent_messages_is_reported_at_the_start(monkeypatch, capsys, tmp_path, has_template):
    async def served(app, engine, listener, args):
        await engine.close()

    monkeypatch.setattr(serve, "_serve", served)
    (tmp_path / "template").write_text("{{ messages[0].content }}")
    options = ["--chat-template", str(tmp_path / "template")] if has_template else []
    assert main(["serve", "--target", str(demo_pair() / "target"), "--draft", "none", "--port", "0", *options]) == 0
    printed = capsys.readouterr().err
    assert ("no chat template" in printed) is not has_template
    assert ("pass --chat-template FILE" in printed) is not has_template


def test_wrong_arguments_end_with_status_2(capsys):
    options = ["serve", "--target", str(demo_pair() / "target"), "--draft", "none"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main([*options, "--port", port]) == 2
    assert f"cannot listen at --host 127.0.0.1 --port {port}" in capsys.readouterr().err
    for more, message in (
        (["--port", "99999"], "cannot listen"),
        (["--port", "0", "--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--port", "0", "--max-waiting", "-1"], "max_waiting"),
        (["--port", "0", "--max-request-bytes", "0"], "max_request_bytes"),
        (["--port", "0", "--timeout", "0"], "timeout"),
        (["--port", "0", "--api-key", ""], "the API key is empty"),
    ):
        assert main([*options, *more]) == 2
        assert message in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
